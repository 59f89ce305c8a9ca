// The CPU's matrix tiles (Intel AMX): products of pairs of bfloat16.
//
// A tile register holds 16 rows of 64 bytes, and there are eight: two by two of results (0 to 3),
// two of a left operand's rows (4, 5) and two of a right operand's columns (6, 7). An instruction
// adds the product of 16 units of depth to 16 x 16 floats in 16 cycles, 16 times the rate of
// vectors; each register loaded is used twice, so that loads take half as long.
#ifndef ATTNLOOM_MATRIX_TILES_H
#define ATTNLOOM_MATRIX_TILES_H

#include "gemm.h"

#define TILE_LOAD(t, from, bytes_between) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(from), "r"(bytes_between) : "memory")
#define TILE_STORE(t, to, bytes_between) \
    asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(to), "r"(bytes_between) : "memory")
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t : :)
// c += left * right
#define TILE_MULTIPLY_ADD(c, left, right) \
    asm volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #c : :)

// result [16 * ROWS][16 * COLUMNS] (+)= left * right; depth: a multiple of 16 units.
template <int ROWS, int COLUMNS, bool ACCUMULATE>
INLINE void multiply_tiles(i64 depth, const Left& left, const Right& right, const Result& result) {
    const i64 left_row = left.row * 4, right_row = right.row * 4, row = result.row * 4;
    const real *a = left.data, *b = right.data;
    const real* a1 = a + 16 * left.row;
    real *c = result.data, *c1 = c + 16 * result.row;
    if (ACCUMULATE) {
        TILE_LOAD(0, c, row);
        if (COLUMNS > 1) TILE_LOAD(1, c + 16, row);
        if (ROWS > 1) TILE_LOAD(2, c1, row);
        if (ROWS > 1 && COLUMNS > 1) TILE_LOAD(3, c1 + 16, row);
    } else {
        TILE_ZERO(0);
        if (COLUMNS > 1) TILE_ZERO(1);
        if (ROWS > 1) TILE_ZERO(2);
        if (ROWS > 1 && COLUMNS > 1) TILE_ZERO(3);
    }
    for (i64 k = 0; k < depth; k += 16) {
        TILE_LOAD(6, b, right_row);
        TILE_LOAD(4, a, left_row);
        TILE_MULTIPLY_ADD(0, 4, 6);
        if (COLUMNS > 1) TILE_LOAD(7, b + 16, right_row);
        if (COLUMNS > 1) TILE_MULTIPLY_ADD(1, 4, 7);
        if (ROWS > 1) TILE_LOAD(5, a1, left_row);
        if (ROWS > 1) TILE_MULTIPLY_ADD(2, 5, 6);
        if (ROWS > 1 && COLUMNS > 1) TILE_MULTIPLY_ADD(3, 5, 7);
        a += 16, a1 += 16, b += 16 * right.row;
    }
    TILE_STORE(0, c, row);
    if (COLUMNS > 1) TILE_STORE(1, c + 16, row);
    if (ROWS > 1) TILE_STORE(2, c1, row);
    if (ROWS > 1 && COLUMNS > 1) TILE_STORE(3, c1 + 16, row);
}

#endif
