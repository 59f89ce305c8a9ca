// What the launcher hands to a kernel, and what follows from it.
//
//   B, Hq, Hkv   batches, query heads, key heads       G         query heads of one key head
//   q_len, kv_len  tokens                              D, DV     sizes of a key and of a value row
//   tile         TILE_M query rows x TILE_N keys       block     a tile of the BlockMask
//   unit         what one FMA consumes: one real, or a pair of bfloat16 in 32 bits (BF16_PAIRS)
//
// Sizes are run-time values: one build serves every shape. Layout of AttentionArgs is mirrored by
// launch_args.py; every field has 8 bytes.
#ifndef ATTNLOOM_ARGS_H
#define ATTNLOOM_ARGS_H

#include "simd.h"

// BF16_INPUTS says that query, key and value are all bfloat16. Where the CPU multiplies pairs of
// bfloat16, tiles stay in that form; elsewhere they are widened while they are packed.
#ifndef BF16_INPUTS
#define BF16_INPUTS 0
#endif
#if BF16_INPUTS && defined(__AVX512BF16__) && VECTOR_BYTES == 64 && !REAL_IS_DOUBLE
#define BF16_PAIRS 1
#define UNIT_ELEMENTS 2
#else
#define BF16_PAIRS 0
#define UNIT_ELEMENTS 1
#endif

// Where the CPU has matrix tiles (AMX) and the system lets the process use them, which the launcher
// says by USE_AMX, pairs are multiplied 16 units deep at a time, so packed depths are multiples of
// that, padded with zeros.
#ifndef USE_AMX
#define USE_AMX 0
#endif
#if BF16_PAIRS && USE_AMX && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__x86_64__)
#define BF16_AMX 1
#define DEPTH_STEP 16
#else
#define BF16_AMX 0
#define DEPTH_STEP 1
#endif

enum Dtype : i64 { DTYPE_F32 = 0, DTYPE_F64 = 1, DTYPE_BF16 = 2, DTYPE_F16 = 3, DTYPE_E4M3 = 4, DTYPE_E5M2 = 5 };

// A [batch, head, row, element] tensor with unit stride in its last dimension; strides in elements.
struct Operand {
    char* data;
    i64 stride_b, stride_h, stride_row;
    i64 dtype;
};

typedef void (*ParallelBody)(i64 begin, i64 end, void* context);
typedef int (*ParallelFor)(i64 begin, i64 end, i64 grain, ParallelBody body, void* context);

struct AttentionArgs {
    Operand query, key, value, out, dout, dq, dk, dv;
    // [B, Hq, q_len], contiguous. max_scores and dlse may be null, and so may row_state,
    // [2, B, Hq, q_len]: largest score and sum of exponentials, for the backward.
    real *lse, *max_scores;
    const real* dlse;
    real* row_state;
    // Ragged lists of live blocks (attnloom/block_mask.py); row_offsets null: every block is full.
    const i64* row_offsets;
    const i32* entries;
    i64 mask_batches, mask_heads, q_block, kv_block, mask_q_len, q_offset, kv_offset;
    i64 B, Bkv, Hq, Hkv, q_len, kv_len, head_dim, value_dim;
    // Of sequences in a cache (attnloom/paged/table.py), see sequences.h; lengths null: all are
    // kv_len long. counts and pages may be null; pages is [B, page_columns].
    const i32 *lengths, *counts, *pages;
    i64 page_columns, page_size;
    // Set by kernels for the sequence at hand, see sequences.h.
    i64 q_start, num_queries;
    const TensorArg* tensors;
    const double* reals;
    const i64* ints;
    // [num_lanes][num_tensors]; null without captured gradients.
    real* const* grads;
    i64 num_tensors;
    // Null: run on the calling thread.
    ParallelFor parallel_for;
    i64 num_threads;
    char* workspace;
    // Backward: how the query rows of a key head are split, and lanes of tasks run in order.
    i64 row_chunks, head_chunks, num_lanes;
    // Decode: parts that the keys are split into, and query heads folded into one tile.
    i64 num_splits, fold;
    double scale;
};

// What the launcher packs. An interpreter that imported it before an upgrade replaced this header
// gets an error from the compiler, and no kernel that reads its words in other places.
#ifdef ARGS_BYTES
static_assert(sizeof(AttentionArgs) == ARGS_BYTES, "attnloom was replaced: start Python again");
#endif

INLINE i64 min_i64(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 max_i64(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
INLINE i64 round_up(i64 a, i64 b) { return ceil_div(a, b) * b; }

INLINE i64 element_bytes(i64 dtype) {
    return dtype == DTYPE_F64 ? 8 : dtype == DTYPE_F32 ? 4 : dtype >= DTYPE_E4M3 ? 1 : 2;
}
INLINE char* row_at(const Operand& t, i64 b, i64 h, i64 row) {
    i64 offset = b * t.stride_b + h * t.stride_h + row * t.stride_row;
    return t.data + offset * element_bytes(t.dtype);
}

// Sizes of packed tiles.
struct Geometry {
    i64 key_units, value_units;  // units in a key row and in a value row, as GEMM depth
    i64 key_lanes, value_lanes;  // reals in the same rows, padded to whole vectors, as GEMM width
    i64 num_key_tiles, tile_m, num_row_tiles;

    explicit Geometry(const AttentionArgs& args) {
        key_units = round_up(ceil_div(args.head_dim, UNIT_ELEMENTS), DEPTH_STEP);
        value_units = round_up(ceil_div(args.value_dim, UNIT_ELEMENTS), DEPTH_STEP);
        key_lanes = round_up(args.head_dim, W);
        value_lanes = round_up(args.value_dim, W);
        num_key_tiles = ceil_div(args.kv_len, TILE_N);
        divide_rows(args, TILE_M);
    }
    void divide_rows(const AttentionArgs& args, i64 most) {
        // A tile of rows never crosses a block, so that one list serves it.
        tile_m = args.row_offsets ? min_i64(most, args.q_block) : most;
        // Queries that begin inside a block reach into one tile more.
        num_row_tiles = ceil_div(args.q_len, tile_m) + (args.lengths && args.row_offsets);
    }
};

struct QueryHead {
    i64 b, h;
};

// Query head number `index` of those that read a kv head, in every batch that shares it.
INLINE QueryHead query_head(const AttentionArgs& args, i64 kv_head, i64 index) {
    i64 group = args.Hq / args.Hkv;
    i64 b = args.Bkv == args.B ? kv_head / args.Hkv : index / group;
    return {b, kv_head % args.Hkv * group + index % group};
}
INLINE i64 query_heads_per_kv(const AttentionArgs& args) {
    return args.Bkv && args.Hkv ? args.Hq / args.Hkv * (args.B / args.Bkv) : 0;
}

// Hands out aligned pieces of the workspace; with a null base it only counts bytes.
struct Arena {
    char* base;
    i64 used;

    explicit Arena(char* memory) : base(memory), used(0) {}

    template <class T> T* take(i64 count) {
        T* piece = (T*)(base + used);
        used = round_up(used + count * (i64)sizeof(T), 64);
        return piece;
    }
};

#endif
