// Memory of the backward: what a worker keeps, and the gradients of keys and values, which are
// summed over shares and written at the end.
#ifndef ATTNLOOM_BACKWARD_MEMORY_H
#define ATTNLOOM_BACKWARD_MEMORY_H

#include "gemm.h"

// On matrix tiles, products that add to dK and dV take no longer than the sums take to come and go,
// so that more rows a tile pay (D=128: 12%), and P and dS in float are kept a panel at a time.
#if MATRIX_TILES
#undef TILE_M
#define TILE_M 128
#define ROWS_AT_ONCE MR
#else
#define ROWS_AT_ONCE TILE_M
#endif

#include "pack.h"
#include "parallel.h"
#include "tiles.h"

// Keys that already have the form GEMM reads are used where they are.
INLINE bool key_in_place(const AttentionArgs& args) {
    i64 own = REAL_IS_DOUBLE ? DTYPE_F64 : DTYPE_F32;
    return !BF16_PAIRS && args.key.dtype == own && args.head_dim % W == 0;
}

// Private to a worker. Of the two names of an operand, the second is the form with the query rows
// as depth; without BF16_PAIRS both are one buffer.
struct Scratch {
    real *keys, *values, *key_rows;  // packed tiles of the kv head, each made when first needed
    u8* packed;                      // [num_key_tiles]
    real *query, *query_right;       // [TILE_M][query_row], [TILE_M / UNIT_ELEMENTS][key_lanes]
    real *dout, *dout_right;         // [TILE_M][dout_row], [TILE_M / UNIT_ELEMENTS][value_lanes]
    real *query_columns, *dout_columns;  // [key_lanes or value_lanes][TILE_M / UNIT_ELEMENTS]
    real *probs, *dscores;  // [ROWS_AT_ONCE][TILE_N]
    real *probs_right, *dscores_right;
    u16* dscores_pairs;
    i8* mask;
    real *dq, *dk, *dv;
    i64 used;

    Scratch(char* memory, const AttentionArgs& args, const Geometry& sizes) {
        Arena arena(memory);
        i64 tiles = sizes.num_key_tiles, row_units = TILE_M / UNIT_ELEMENTS;
        keys = arena.take<real>(tiles * sizes.key_units * TILE_N);
        values = arena.take<real>(tiles * sizes.value_units * TILE_N);
        key_rows = arena.take<real>(
            key_in_place(args) ? 0 : tiles * Packed::size(TILE_N / UNIT_ELEMENTS, sizes.key_lanes));
        packed = arena.take<u8>(tiles);
        query = query_right = arena.take<real>(TILE_M * round_up(sizes.key_units, W));
        dout = dout_right = arena.take<real>(TILE_M * round_up(sizes.value_units, W));
        probs = probs_right = arena.take<real>(ROWS_AT_ONCE * TILE_N);
        dscores = dscores_right = arena.take<real>(ROWS_AT_ONCE * TILE_N);
        dscores_pairs = arena.take<u16>(BF16_PAIRS ? TILE_M * TILE_N : 0);
        if (BF16_PAIRS) {
            query_right = arena.take<real>(Packed::size(row_units, sizes.key_lanes));
            dout_right = arena.take<real>(Packed::size(row_units, sizes.value_lanes));
            query_columns = arena.take<real>(MATRIX_TILES ? row_units * sizes.key_lanes : 0);
            dout_columns = arena.take<real>(MATRIX_TILES ? row_units * sizes.value_lanes : 0);
            probs_right = arena.take<real>(row_units * TILE_N);
            dscores_right = arena.take<real>(row_units * TILE_N);
        }
        mask = arena.take<i8>(TILE_M * TILE_N);
        dq = arena.take<real>(TILE_M * sizes.key_lanes);
        dk = arena.take<real>(tiles * TILE_N * sizes.key_lanes);
        dv = arena.take<real>(tiles * TILE_N * sizes.value_lanes);
        used = arena.used;
    }
};

struct BackwardLayout {
    Geometry sizes;
    i64 num_chunks, num_tasks, num_lanes;
    i64 dk_size, dv_size;       // reals of a kv head's dK and dV
    real *dk_parts, *dv_parts;  // [num_tasks][...] with more than one chunk
    char* scratch;              // [workers][worker_bytes]
    i64 worker_bytes, total_bytes;

    explicit BackwardLayout(const AttentionArgs& args) : sizes(args) {
        sizes.divide_rows(args, TILE_M);
        // The launcher counts on tiles of 64 rows.
        if (args.row_chunks > sizes.num_row_tiles) sizes.divide_rows(args, 64);
        num_chunks = args.head_chunks * args.row_chunks;
        num_tasks = args.Bkv * args.Hkv * num_chunks;
        num_lanes = min_i64(args.num_lanes, num_tasks);
        dk_size = sizes.num_key_tiles * TILE_N * sizes.key_lanes;
        dv_size = sizes.num_key_tiles * TILE_N * sizes.value_lanes;
        worker_bytes = Scratch(nullptr, args, sizes).used;
        Arena arena(args.workspace);
        i64 parts = num_chunks > 1 ? num_tasks : 0;
        dk_parts = arena.take<real>(parts * dk_size);
        dv_parts = arena.take<real>(parts * dv_size);
        scratch = arena.take<char>(min_i64(num_workers(args), num_lanes) * worker_bytes);
        total_bytes = arena.used;
    }
};

// Shares of a kv head's gradient: `count` of them, `size` reals apart, rows of `lanes` reals.
struct Shares {
    real* first;
    i64 count, size, lanes;
};

#if MATRIX_TILES
// As below, of shares that have keys as columns, in strips of [lanes][STRIP].
static void write_sum(const Operand& target, i64 kv_b, i64 kv_h, Span keys, i64 row_size,
                      const Shares& shares, real factor) {
    for (i64 k = keys.begin; k < keys.end; k += W)
        for (i64 d = 0; d < row_size; d += W) {
            real* block = shares.first + k / STRIP * STRIP * shares.lanes + d * STRIP + k % STRIP;
            vf rows[W];
            for (i64 i = 0; i < W; i++) {
                rows[i] = vf_load(block + i * STRIP);
                for (i64 share = 1; share < shares.count; share++)
                    rows[i] += vf_load(block + share * shares.size + i * STRIP);
            }
            transpose_block(rows);
            for (i64 i = 0; i < min_i64(W, keys.end - k); i++)
                store_lanes(row_at(target, kv_b, kv_h, k + i), target.dtype, d, row_size,
                            rows[i] * factor);
        }
}
#else
// target[keys] = factor * sum of the shares, added in order.
static void write_sum(const Operand& target, i64 kv_b, i64 kv_h, Span keys, i64 row_size,
                      const Shares& shares, real factor) {
    for (i64 k = keys.begin; k < keys.end; k++) {
        real* row = shares.first + k * shares.lanes;
        for (i64 share = 1; share < shares.count; share++)
            for (i64 d = 0; d < shares.lanes; d += W)
                vf_store(row + d, vf_load(row + d) + vf_load(row + share * shares.size + d));
        store_row(row_at(target, kv_b, kv_h, k), target.dtype, row_size, row, factor);
    }
}
#endif

static void write_key_gradients(const AttentionArgs& args, const BackwardLayout& layout,
                                i64 kv_head, Span keys, real* dk, real* dv) {
    i64 b = kv_head / args.Hkv, h = kv_head % args.Hkv, count = layout.num_chunks;
    write_sum(args.dk, b, h, keys, args.head_dim,
              {dk, count, layout.dk_size, layout.sizes.key_lanes}, (real)args.scale);
    write_sum(args.dv, b, h, keys, args.value_dim,
              {dv, count, layout.dv_size, layout.sizes.value_lanes}, 1);
}

#endif
