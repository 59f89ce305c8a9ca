// Sequences of a cache: each has a length, a first position and perhaps a table of pages.
//
//   here      AttentionArgs of one sequence: kv_len is its length, q_start the position of its
//             first query, num_queries how many of its query rows exist
//   piece     consecutive keys of one page, few enough that what is read AHEAD rows later is as far
//             from each of them; without pages a tile is one piece
//
// Kernels work on positions in the sequence throughout; only where a row is read or written does
// its place matter.
#ifndef ATTNLOOM_SEQUENCES_H
#define ATTNLOOM_SEQUENCES_H

#include "pack.h"

INLINE i64 clamp_i64(i64 x, i64 low, i64 high) { return max_i64(low, min_i64(x, high)); }

INLINE i64 sequence_length(const AttentionArgs& args, i64 b) {
    return args.lengths ? clamp_i64(args.lengths[b], 0, args.kv_len) : args.kv_len;
}

// The arguments as sequence b sees them.
INLINE AttentionArgs of_sequence(const AttentionArgs& args, i64 b) {
    AttentionArgs here = args;
    here.num_queries = args.counts ? clamp_i64(args.counts[b], 0, args.q_len) : args.q_len;
    here.kv_len = sequence_length(args, b);
    here.q_start = args.lengths ? max_i64(0, here.kv_len - here.num_queries) : 0;
    return here;
}

// Keys that a tile of a kv head holds: those of its sequence, or of the longest of all that share
// it.
INLINE i64 stored_length(const AttentionArgs& args, i64 b) {
    if (args.Bkv == args.B || !args.lengths) return sequence_length(args, b);
    i64 longest = 0;
    for (i64 i = 0; i < args.B; i++) longest = max_i64(longest, sequence_length(args, i));
    return longest;
}

// Row `key` of a head's keys or values.
INLINE char* key_row(const AttentionArgs& args, const Operand& t, i64 b, i64 h, i64 key) {
    if (!args.pages) return row_at(t, b, h, key);
    i64 page = args.pages[b * args.page_columns + key / args.page_size];
    return row_at(t, page, h, key % args.page_size);
}

// body(begin, end, rows) for every piece of keys k0 .. k0 + count; `rows` counts from k0, and rows
// begin .. min(end, count) of it exist. Pieces are whole vectors.
template <class Body>
INLINE void for_each_piece(const AttentionArgs& args, const Operand& t, i64 b, i64 h, i64 k0,
                           i64 count, i64 size, const Body& body) {
    i64 step = args.pages ? min_i64(args.page_size, min_i64(AHEAD, TILE_N)) : TILE_N;
    for (i64 begin = 0; begin < count; begin += step) {
        char* first = key_row(args, t, b, h, k0 + begin);
        Rows rows(t, first, min_i64(count, begin + step), size);
        rows.data -= begin * rows.bytes_between;
        rows.ahead = AHEAD * rows.bytes_between;
        if (args.pages) {
            i64 later = min_i64(k0 + begin + AHEAD, args.kv_len - 1);
            rows.ahead = key_row(args, t, b, h, later) - first;
        }
        body(begin, begin + step, rows);
    }
}

#endif
