// Products of up to 16 query rows with keys and values on matrix tiles, for decode.
//
// Keys are a left operand as they lie in memory, 16 of them by 16 query rows, and the scores are
// transposed afterwards. Values are paired, 32 keys at a time. This pays from five rows on: 16 of
// them take half the time of vectors.
#ifndef ATTNLOOM_FEW_ROWS_AMX_H
#define ATTNLOOM_FEW_ROWS_AMX_H

#include "matrix_tiles.h"
#include "pack.h"

// scores[r][key] = query[r] . keys[key] for the keys of a range, whole vectors.
// query [row_units][16]; block: memory for 16 rows. What `ahead` says is asked for.
NOINLINE void dot_keys_on_tiles(const real* query, i64 row_units, const Rows& keys, Range range,
                                i64 num_rows, real* block, real* scores) {
    const bool whole_rows = keys.dtype == DTYPE_BF16 && keys.size % (2 * W) == 0;
    for (i64 k = range.begin; k < range.end; k += 16) {
        // Rows that do not exist are not read.
        const bool in_place = whole_rows && k + 16 <= keys.count;
        Left left = {(const real*)keys[k], keys.bytes_between / (i64)sizeof(real), 1};
        if (in_place) {
            for (i64 i = 0; i < 16; i++)
                for (i64 d = 0; d < row_units * (i64)sizeof(real); d += 64)
                    __builtin_prefetch(keys[k + i] + keys.ahead + d);
        } else {
            for (i64 i = 0; i < 16; i++)
                for (i64 d = 0; d < row_units; d += W)
                    vf_store(block + i * row_units + d,
                             k + i < keys.count ? load_units(keys[k + i], keys.dtype, d, keys.size)
                                                : (vf){});
            left = {block, row_units, 1};
        }
        real products[16 * 16] __attribute__((aligned(64)));
        multiply_tiles<1, 1, false>(row_units, left, {query, 16}, {products, 16});
        vf lanes[16];
        for (i64 i = 0; i < 16; i++) lanes[i] = vf_load(products + i * 16);
        transpose_block(lanes);
        for (i64 r = 0; r < num_rows; r++) vf_store(scores + r * TILE_N + k, lanes[r]);
    }
}

// acc [16][lanes] += probs * values for a range of units, widened to whole tiles.
// values: packed, [unit][lanes].
NOINLINE void add_values_on_tiles(const real* probs, i64 probs_row, const real* values, Range units,
                                  i64 lanes, real* acc) {
    const i64 begin = units.begin / 16 * 16, depth = round_up(units.end - begin, 16);
    const Left left = {probs + begin, probs_row, 1};
    for (i64 d = 0; d < lanes; d += 32) {
        const Right right = {values + begin * lanes + d, lanes};
        if (d + 32 <= lanes)
            multiply_tiles<1, 2, true>(depth, left, right, {acc + d, lanes});
        else
            multiply_tiles<1, 1, true>(depth, left, right, {acc + d, lanes});
    }
}

#endif
