// The products of gemm.h on matrix tiles. Panels are 32 rows, strips 32 columns.
//
// Depths, and columns of scores, are whole tiles: callers pad them with zeros.
#ifndef ATTNLOOM_GEMM_AMX_H
#define ATTNLOOM_GEMM_AMX_H

#include "matrix_tiles.h"

// As in gemm.h, strips outermost too. A panel's range is widened to whole strips of 32 columns.
NOINLINE void multiply_columns(i64 num_panels, const Range* columns, i64 depth, const Left& left,
                               const real* keys, real* scores) {
    const Packed right = {keys, depth, TILE_N};
    for (i64 n = 0; n < TILE_N; n += STRIP)
        for (i64 p = 0; p < num_panels; p++)
            if (n < columns[p].end && n + STRIP > columns[p].begin)
                multiply_tiles<2, 2, false>(depth, left.at(p * MR, 0), right.at(0, n),
                                            {scores + p * MR * TILE_N + n, TILE_N});
}

// As in gemm.h. A panel's range of depth is widened to whole tiles.
NOINLINE void multiply_depths(i64 num_panels, const Range* depths, i64 width, const Left& left,
                              const Packed& right, const Result& result) {
    for (i64 n = 0; n < width; n += STRIP)
        for (i64 p = 0; p < num_panels; p++) {
            if (depths[p].end <= depths[p].begin) continue;
            i64 begin = depths[p].begin / 16 * 16, depth = round_up(depths[p].end - begin, 16);
            Left a = left.at(p * MR, begin);
            Right b = right.at(begin, n);
            Result c = result.at(p * MR, n);
            if (n + STRIP <= width)
                multiply_tiles<2, 2, true>(depth, a, b, c);
            else
                multiply_tiles<2, 1, true>(depth, a, b, c);
        }
}

// result += left * right, with the strips of `result`, [height][32], one after the other; each
// takes its range of depth, in whole tiles. height: a multiple of 16.
NOINLINE void multiply_strips(i64 num_strips, const Range* depths, i64 height, const Left& left,
                              const Packed& right, real* result) {
    for (i64 s = 0; s < num_strips; s++) {
        i64 begin = depths[s].begin, depth = depths[s].end - begin;
        if (depth <= 0) continue;
        const Right b = right.at(begin, s * STRIP);
        const Result strip = {result + s * height * STRIP, STRIP};
        for (i64 i = 0; i < height; i += 32)
            if (i + 32 <= height)
                multiply_tiles<2, 2, true>(depth, left.at(i, begin), b, strip.at(i, 0));
            else
                multiply_tiles<1, 2, true>(depth, left.at(i, begin), b, strip.at(i, 0));
    }
}

#endif
