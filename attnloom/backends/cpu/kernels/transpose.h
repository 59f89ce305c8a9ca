// Transposition of W x W lanes in registers, and reductions of W vectors at once.
#ifndef ATTNLOOM_TRANSPOSE_H
#define ATTNLOOM_TRANSPOSE_H

#include "simd.h"

// One step of a transposition: lanes of the first half of the rows interleave with those of the
// second.
#if W == 16
#define INTERLEAVE_LOW(a, b) \
    VF_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define INTERLEAVE_HIGH(a, b) \
    VF_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOG2_W 4
#elif W == 8
#define INTERLEAVE_LOW(a, b) VF_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define INTERLEAVE_HIGH(a, b) VF_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOG2_W 3
#elif W == 4
#define INTERLEAVE_LOW(a, b) VF_SHUFFLE(a, b, 0, 4, 1, 5)
#define INTERLEAVE_HIGH(a, b) VF_SHUFFLE(a, b, 2, 6, 3, 7)
#define LOG2_W 2
#else
#define INTERLEAVE_LOW(a, b) VF_SHUFFLE(a, b, 0, 2)
#define INTERLEAVE_HIGH(a, b) VF_SHUFFLE(a, b, 1, 3)
#define LOG2_W 1
#endif

// lanes[i][j] becomes lanes[j][i].
INLINE void transpose_block(vf* lanes) {
#pragma GCC unroll 4
    for (int round = 0; round < LOG2_W; round++) {
        vf mixed[W];
#pragma GCC unroll 8
        for (int i = 0; i < W / 2; i++) {
            mixed[2 * i] = INTERLEAVE_LOW(lanes[i], lanes[i + W / 2]);
            mixed[2 * i + 1] = INTERLEAVE_HIGH(lanes[i], lanes[i + W / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) lanes[i] = mixed[i];
    }
}

// to[column][row] = from[row][column]; numbers of both are multiples of W.
NOINLINE void transpose(i64 rows, i64 columns, const real* from, i64 from_row, real* to,
                        i64 to_row) {
    for (i64 i = 0; i < rows; i += W)
        for (i64 j = 0; j < columns; j += W) {
            vf lanes[W];
#pragma GCC unroll 16
            for (int x = 0; x < W; x++) lanes[x] = vf_load(from + (i + x) * from_row + j);
            transpose_block(lanes);
#pragma GCC unroll 16
            for (int x = 0; x < W; x++) vf_store(to + (j + x) * to_row + i, lanes[x]);
        }
}

// Lane i of the result combines the lanes of vector i: two shuffles a vector instead of the dozen
// instructions that each horizontal reduction takes.
#define DEFINE_ACROSS(name, COMBINE)                                                       \
    INLINE vf name(vf* v) {                                                                \
        _Pragma("GCC unroll 4") for (int half = W / 2; half >= 1; half /= 2) {             \
            _Pragma("GCC unroll 8") for (int i = 0; i < half; i++) {                       \
                vf a = INTERLEAVE_LOW(v[i], v[i + half]), b = INTERLEAVE_HIGH(v[i], v[i + half]); \
                v[i] = COMBINE;                                                            \
            }                                                                              \
        }                                                                                  \
        return v[0];                                                                       \
    }
DEFINE_ACROSS(sums_across, a + b)
DEFINE_ACROSS(maxima_across, vf_max(a, b))
#undef DEFINE_ACROSS

#endif
