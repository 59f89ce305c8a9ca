// Which key tiles a tile of query rows visits, and what of them is live.
//
// The lists of a BlockMask are read at the kernel's own granularity: a block wider than TILE_N is
// visited in parts, neighbouring narrow blocks share a tile. A partial tile's mask is evaluated
// once, before any product, into one byte a score; from it follow the columns that each panel of MR
// rows needs, so that GEMM and softmax skip what is hidden.
#ifndef ATTNLOOM_TILES_H
#define ATTNLOOM_TILES_H

#include "args.h"
#include "gemm.h"

struct KeyTile {
    i64 index;  // keys index * TILE_N ...
    i32 begin,
        end;      // live columns lie in begin .. end; end may cut the last vector (`masked` then)
    bool masked;  // some column in begin .. round_up(end, W) is hidden from some row
    i64 first, last;  // the list entries that lie in this tile

    // Whether products may touch keys that some row does not see: those on matrix tiles are wider
    // than a block.
    bool hides_keys() const { return masked || begin > 0 || end < TILE_N; }
};

// Walks steps begin .. end of a row of lists. A step is an entry, or a TILE_N-wide part of one.
class KeyTiles {
    const AttentionArgs& args;
    i64 step, end;
    i64 parts;  // steps in an entry

  public:
    KeyTiles(const AttentionArgs& a, i64 begin_step, i64 end_step)
        : args(a), step(begin_step), end(end_step), parts(parts_of(a)) {}

    static i64 parts_of(const AttentionArgs& a) {
        return a.row_offsets ? max_i64(1, a.kv_block / TILE_N) : 1;
    }

    bool next(KeyTile& tile) {
        if (!args.row_offsets) {
            if (step >= end) return false;
            tile.index = step++;
            tile.begin = 0;
            tile.first = tile.last = 0;
            tile.masked = false;
            return finish(tile, TILE_N);
        }
        while (step < end) {
            i64 entry = step / parts, code = args.entries[entry];
            i64 start = (code >> 1) * args.kv_block + step % parts * TILE_N;
            if (start >= args.kv_len) {
                step++;
                continue;
            }
            tile.index = start / TILE_N;
            tile.first = entry;
            tile.masked = HAS_MASK && (code & 1);
            if (parts > 1 || args.kv_block == TILE_N) {
                step++;
                tile.begin = 0;
                tile.last = entry + 1;
                return finish(tile, TILE_N);
            }
            return finish(tile, merge_narrow(tile, start));
        }
        return false;
    }

  private:
    // Takes every further block that lies in the same tile; returns the end of the last.
    i64 merge_narrow(KeyTile& tile, i64 start) {
        i64 origin = tile.index * TILE_N, stop = start;
        tile.begin = (i32)(start - origin);
        while (step < end) {
            i64 code = args.entries[step], block = (code >> 1) * args.kv_block;
            if (block >= origin + TILE_N || block >= args.kv_len) break;
            tile.masked |= (HAS_MASK && (code & 1)) || block != stop;
            stop = block + args.kv_block;
            step++;
        }
        tile.last = step;
        return stop - origin;
    }

    bool finish(KeyTile& tile, i64 stop) {
        tile.end = (i32)min_i64(stop, args.kv_len - tile.index * TILE_N);
        tile.masked |= tile.end % W != 0;
        return true;
    }
};

struct Span {
    i64 begin, end;
};

// Steps of the lists that the query at position q0 of head (b, h) reads.
INLINE Span key_steps(const AttentionArgs& args, i64 b, i64 h, i64 q0) {
    if (!args.row_offsets) return {0, ceil_div(args.kv_len, TILE_N)};
    i64 mask_b = args.mask_batches > 1 ? b : 0, mask_h = args.mask_heads > 1 ? h : 0;
    i64 blocks = ceil_div(args.mask_q_len, args.q_block);
    // Lengths that pass the mask would read beyond the lists.
    i64 block = min_i64(q0 / args.q_block, blocks - 1);
    i64 row = (mask_b * args.mask_heads + mask_h) * blocks + block;
    i64 parts = KeyTiles::parts_of(args);
    return {args.row_offsets[row] * parts, args.row_offsets[row + 1] * parts};
}

// Consecutive query rows of one head, the first at position q0, with what the mods compute once a
// head and once a row.
struct RowGroup {
    i64 b, h, q0;
    i32 num_rows;
#if HAS_SCORE
    Head head;
    Row rows[TILE_M];
#endif
#if HAS_MASK
    MaskHead mask_head;
    MaskRow mask_rows[TILE_M];
#endif
};

// What the score_mod computes once a key; `none` keeps signatures alike without a score_mod.
#if HAS_SCORE
typedef Column TileColumn;
#else
struct TileColumn {
    char none;
};
#endif

INLINE void enter_keys(const ModArgs& mods, const RowGroup& group, i64 k0, TileColumn& column) {
#if HAS_SCORE
    column_values(mods, group.head, group.b, group.h, k0, column);
#else
    column.none = 0;
#endif
    (void)mods, (void)group, (void)k0;
}

NOINLINE void enter_head(const ModArgs& mods, i64 b, i64 h, RowGroup& group) {
    group.b = b;
    group.h = h;
#if HAS_SCORE
    head_values(mods, b, h, group.head);
#endif
#if HAS_MASK
    mask_head_values(mods, b, h, group.mask_head);
#endif
    (void)mods;
}

NOINLINE void enter_rows(const AttentionArgs& args, const ModArgs& mods, i64 q0, i64 num_rows,
                         RowGroup& group) {
    group.q0 = q0;
    group.num_rows = (i32)num_rows;
    for (i64 i = 0; i < num_rows; i++) {
#if HAS_SCORE
        row_values(mods, group.head, group.b, group.h, q0 + i, group.rows[i]);
#endif
#if HAS_MASK
        mask_row_values(mods, group.mask_head, group.b, group.h, q0 + i + args.q_offset,
                        group.mask_rows[i]);
#endif
    }
    (void)args;
    (void)mods;
}

#if HAS_MASK
// Evaluates the mask_mod for columns begin .. end of the tile at k0; end may cut the last vector.
NOINLINE void evaluate_mask(const AttentionArgs& args, const ModArgs& mods, const RowGroup& group,
                            const MaskColumn& column, i64 k0, i32 begin, i32 end, i8* mask) {
    i64 k_seen = k0 + args.kv_offset;
    for (i32 i = 0; i < group.num_rows; i++) {
        i64 q_seen = group.q0 + i + args.q_offset;
        i8* row = mask + i * TILE_N;
        for (i32 x = begin; x < end; x += W) {
            vm live = mask_mod(mods, group.mask_head, group.mask_rows[i], column, group.b, group.h,
                               q_seen, k_seen + x, x);
            store_as(row + x, bytes_from_vm(live));
        }
        if (end % W) __builtin_memset(row + end, 0, W - end % W);
    }
}
#endif

// mask [num_rows][TILE_N]: -1 where a score of the tile is live, else 0.
NOINLINE void fill_mask(const AttentionArgs& args, const ModArgs& mods, const RowGroup& group,
                        const KeyTile& tile, i8* mask) {
    i64 k0 = tile.index * TILE_N;
    __builtin_memset(mask, 0, group.num_rows * TILE_N);
    if (!args.row_offsets) {
        for (i32 i = 0; i < group.num_rows; i++) __builtin_memset(mask + i * TILE_N, -1, tile.end);
        return;
    }
#if HAS_MASK
    MaskColumn column;
    mask_column_values(mods, group.mask_head, group.b, group.h, k0 + args.kv_offset, column);
#endif
    for (i64 entry = tile.first; entry < tile.last; entry++) {
        i64 code = args.entries[entry], block = (code >> 1) * args.kv_block - k0;
        i32 begin = (i32)max_i64(0, block), end = (i32)min_i64(tile.end, block + args.kv_block);
#if HAS_MASK
        if (code & 1) {
            evaluate_mask(args, mods, group, column, k0, begin, end, mask);
            continue;
        }
#endif
        for (i32 i = 0; i < group.num_rows; i++)
            __builtin_memset(mask + i * TILE_N + begin, -1, end - begin);
    }
    (void)mods;
}

// Whether some of `count` rows sees one of the W columns at `mask`.
INLINE bool any_row(const i8* mask, i32 count) {
    v_i8 seen = {};
    for (i32 i = 0; i < count; i++) seen |= load_as<v_i8>(mask + i * TILE_N);
    return bytes_any(seen);
}

// Columns of each panel of MR rows that some row sees, in whole vectors; the number of live panels.
NOINLINE i32 live_columns(const KeyTile& tile, const i8* mask, i32 num_rows, Range* columns) {
    i32 num_live = 0;
    for (i32 first = 0, p = 0; first < num_rows; first += MR, p++) {
        const i8* rows = mask + first * TILE_N;
        i32 count = num_rows - first < MR ? num_rows - first : MR;
        i32 begin = tile.begin, end = (i32)round_up(tile.end, W);
        while (begin < end && !any_row(rows + begin, count)) begin += W;
        while (begin < end && !any_row(rows + end - W, count)) end -= W;
        columns[p] = {begin, end};
        num_live += begin < end;
    }
    return num_live;
}

INLINE ModArgs mod_args(const AttentionArgs& args, real* const* grads) {
    return {args.tensors, args.reals, args.ints, grads, args.q_len, args.kv_len};
}

#endif
