// Matrix products on tiles that lie in cache, one microkernel for every type.
//
// C[M, N] (+)= A[M, K] * B[K, N], K in units. A panel of MR rows times a strip of two vectors of
// columns stays in registers: 8 x 2 vectors where there are 32 registers, 4 x 2 where there are 16,
// and 32 x 2 vectors where there are matrix tiles (gemm_amx.h).
// The accumulators are named variables: gcc 12 spills an array of them (87 instead of 277 GFLOP/s).
//
// Block-sparse tiles enter as ranges: each panel of rows says which columns it needs (scores) or
// which part of the depth is not zero (all other products).
#ifndef ATTNLOOM_GEMM_H
#define ATTNLOOM_GEMM_H

#include "args.h"

// Rows of a panel; decode, whose tiles are a few rows, asks for 4.
#ifndef MR
#if BF16_AMX
#define MR 32
#elif VECTOR_BYTES == 64 || defined(__aarch64__)
#define MR 8
#else
#define MR 4
#endif
#endif
#if MR == 8
#define FOR_EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#elif MR == 4
#define FOR_EACH_ROW(X) X(0) X(1) X(2) X(3)
#endif
#define MATRIX_TILES (BF16_AMX && MR == 32)
#define STRIP (2 * W)
#define MAX_PANELS (TILE_M / MR)

struct Range {
    i32 begin, end;
};

#if BF16_PAIRS
// c += a.even * b.even + a.odd * b.odd, in float
#define MULTIPLY_ADD(c, a, b) asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(b), "v"(a))
#else
#define MULTIPLY_ADD(c, a, b) c += a * b
#endif

// Operands. Element (i, k) of a left one is at data[i * row + k * step].
struct Left {
    const real* data;
    i64 row, step;

    Left at(i64 i, i64 k) const { return {data + i * row + k * step, row, step}; }
};
struct Right {
    const real* data;
    i64 row;

    Right at(i64 k, i64 n) const { return {data + k * row + n, row}; }
};
// A right operand packed for `depth` units: on vectors as rows of `width` lanes; on matrix tiles as
// strips of columns one after the other, which the first-level cache keeps better.
struct Packed {
    const real* data;
    i64 depth, width;

    static i64 size(i64 depth, i64 width) {
        return depth * (MATRIX_TILES ? round_up(width, STRIP) : width);
    }
    static i64 offset(i64 depth, i64 width, i64 k, i64 n) {
        return MATRIX_TILES ? n / STRIP * STRIP * depth + k * STRIP + n % STRIP : k * width + n;
    }
    Right at(i64 k, i64 n) const {
        return {data + offset(depth, width, k, n), MATRIX_TILES ? STRIP : width};
    }
};
struct Result {
    real* data;
    i64 row;

    Result at(i64 i, i64 n) const { return {data + i * row + n, row}; }
};

#if BF16_AMX
#include "matrix_tiles.h"
#endif
#if MATRIX_TILES
#include "gemm_amx.h"
#else

#define DECLARE_PAIR(i) vf c##i##_0, c##i##_1;
#define ADD_PAIR(i) c##i##_0 += vf_load(c + i * c_row), c##i##_1 += vf_load(c + i * c_row + W);
#define ZERO_PAIR(i) c##i##_0 = (vf){}, c##i##_1 = (vf){};
#define STORE_PAIR(i) vf_store(c + i * c_row, c##i##_0), vf_store(c + i * c_row + W, c##i##_1);
#define UPDATE_PAIR(i)                 \
    {                                  \
        vf x = vf_set(a[i * a_row]);   \
        MULTIPLY_ADD(c##i##_0, x, b0); \
        MULTIPLY_ADD(c##i##_1, x, b1); \
    }

#define DECLARE_ONE(i) vf c##i;
#define ZERO_ONE(i) c##i = (vf){};
#define ADD_ONE(i) c##i += vf_load(c + i * c_row);
#define STORE_ONE(i) vf_store(c + i * c_row, c##i);
#define UPDATE_ONE(i)                \
    {                                \
        vf x = vf_set(a[i * a_row]); \
        MULTIPLY_ADD(c##i, x, b0);   \
    }

// What is accumulated is added last: a tile's products are summed by themselves first, so that the
// chain of roundings is as long as a tile is deep, not as long as the sequence.
template <bool ACCUMULATE>
INLINE void multiply_pair(i64 depth, const Left& left, const Right& right, const Result& result) {
    const real *a = left.data, *b = right.data;
    real* c = result.data;
    const i64 a_row = left.row, a_step = left.step, b_row = right.row, c_row = result.row;
    FOR_EACH_ROW(DECLARE_PAIR)
    FOR_EACH_ROW(ZERO_PAIR)
    for (i64 k = 0; k < depth; k++, a += a_step, b += b_row) {
        vf b0 = vf_load(b), b1 = vf_load(b + W);
        FOR_EACH_ROW(UPDATE_PAIR)
    }
    if (ACCUMULATE) {
        FOR_EACH_ROW(ADD_PAIR)
    }
    FOR_EACH_ROW(STORE_PAIR)
}

INLINE void multiply_one(i64 depth, const Left& left, const Right& right, const Result& result) {
    const real *a = left.data, *b = right.data;
    real* c = result.data;
    const i64 a_row = left.row, a_step = left.step, b_row = right.row, c_row = result.row;
    FOR_EACH_ROW(DECLARE_ONE)
    FOR_EACH_ROW(ZERO_ONE)
    for (i64 k = 0; k < depth; k++, a += a_step, b += b_row) {
        vf b0 = vf_load(b);
        FOR_EACH_ROW(UPDATE_ONE)
    }
    FOR_EACH_ROW(ADD_ONE)
    FOR_EACH_ROW(STORE_ONE)
}

// scores [.., TILE_N] = left * right, for each panel in its range of columns. The strip is the
// outer loop: it stays in the first-level cache while the panels pass over it.
NOINLINE void multiply_columns(i64 num_panels, const Range* columns, i64 depth, const Left& left,
                               const real* keys, real* scores) {
    const Packed right = {keys, depth, TILE_N};
    for (i64 n = 0; n < TILE_N; n += STRIP)
        for (i64 p = 0; p < num_panels; p++)
            if (n < columns[p].end && n + STRIP > columns[p].begin)
                multiply_pair<false>(depth, left.at(p * MR, 0), right.at(0, n),
                                     {scores + p * MR * TILE_N + n, TILE_N});
}

// result[panel, 0:width] += left[panel, depths of the panel] * right. width: a multiple of W.
NOINLINE void multiply_depths(i64 num_panels, const Range* depths, i64 width, const Left& left,
                              const Packed& right, const Result& result) {
    for (i64 n = 0; n < width; n += STRIP)
        for (i64 p = 0; p < num_panels; p++) {
            i64 begin = depths[p].begin, depth = depths[p].end - begin;
            if (depth <= 0) continue;
            Left a = left.at(p * MR, begin);
            Right b = right.at(begin, n);
            Result c = result.at(p * MR, n);
            if (n + STRIP <= width)
                multiply_pair<true>(depth, a, b, c);
            else
                multiply_one(depth, a, b, c);
        }
}

#endif

#endif
