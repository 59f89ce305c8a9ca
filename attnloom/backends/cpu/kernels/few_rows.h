// Products of four query rows with keys and values as they lie in memory, for decode.
//
// Every key and value is read once, so these products wait for memory, and what counts is to read
// it in order. Keys are not transposed (32 shuffles a key of 128 elements): four rows meet four
// keys in dot products, whose 16 accumulators are summed across lanes together, eight shuffles a
// key. Values are added to an accumulator that stays in the first-level cache, four units at a
// time. A row by itself does not wait for three others that do not exist.
#ifndef ATTNLOOM_FEW_ROWS_H
#define ATTNLOOM_FEW_ROWS_H

#include "gemm.h"
#include "pack.h"

#if MR != 4
#error "few_rows.h is written for panels of four rows"
#endif

// Keys, or units of values, taken at a time: as many as registers hold for four rows.
#if W >= 16
#define STEP 4
#define FOR_EACH_STEP(X, ...) \
    X(0, __VA_ARGS__) X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__)
#elif W >= 8
#define STEP 2
#define FOR_EACH_STEP(X, ...) X(0, __VA_ARGS__) X(1, __VA_ARGS__)
#else
#define STEP 1
#define FOR_EACH_STEP(X, ...) X(0, __VA_ARGS__)
#endif
#define FOR_EACH_ROW_STEP(X) \
    FOR_EACH_STEP(X, 0) FOR_EACH_STEP(X, 1) FOR_EACH_STEP(X, 2) FOR_EACH_STEP(X, 3)

// Sums across lanes of 4 * STEP vectors: element r * STEP + s of `sums` is that of vector (r, s).
INLINE void sum_across(vf* v, real* sums) {
#if W >= 4
#pragma GCC unroll 4
    for (int half = 2 * STEP; half >= 1; half /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < half; i++)
            v[i] = INTERLEAVE_LOW(v[i], v[i + half]) + INTERLEAVE_HIGH(v[i], v[i + half]);
    }
    vf_store(sums, v[0]);
#else
    for (int i = 0; i < 4 * STEP; i++) sums[i] = vf_hsum(v[i]);
#endif
}

// scores[r][key] = query[r] . keys[key] for four rows and the keys of a range, which begins and
// ends at whole vectors. query [4][row_units]; keys: `count` rows of row_units units, row_bytes
// apart; what is `ahead` bytes further is asked for.
NOINLINE void dot_keys(const real* query, i64 row_units, const char* keys, i64 row_bytes, i64 ahead,
                       i64 count, Range range, real* scores) {
    for (i64 k = range.begin; k < range.end; k += STEP) {
        // A row that does not exist is replaced by the last; its score is masked.
#define KEY_ROW(s, _) \
    const real* key##s = (const real*)(keys + min_i64(k + s, count - 1) * row_bytes);
#define ZERO_DOT(s, r) vf dot##r##_##s = {};
#define LOAD_KEY(s, _)             \
    vf x##s = vf_load(key##s + d); \
    __builtin_prefetch((const char*)(key##s + d) + ahead);
#define ADD_DOT(s, r) MULTIPLY_ADD(dot##r##_##s, y##r, x##s);
#define LIST_DOT(s, r) dot##r##_##s,
        FOR_EACH_STEP(KEY_ROW, )
        FOR_EACH_ROW_STEP(ZERO_DOT)
        for (i64 d = 0; d < row_units; d += W) {
            const real* q = query + d;
            vf y0 = vf_load(q), y1 = vf_load(q + row_units), y2 = vf_load(q + 2 * row_units),
               y3 = vf_load(q + 3 * row_units);
            FOR_EACH_STEP(LOAD_KEY, )
            FOR_EACH_ROW_STEP(ADD_DOT)
        }
        vf dots[] = {FOR_EACH_ROW_STEP(LIST_DOT)};
        real sums[4 * STEP + W];
        sum_across(dots, sums);
        for (i64 r = 0; r < 4; r++)
            for (i64 s = 0; s < STEP; s++) scores[r * TILE_N + k + s] = sums[r * STEP + s];
    }
}

// The same of one row, W keys at a time.
NOINLINE void dot_keys_one_row(const real* query, i64 row_units, const char* keys, i64 row_bytes,
                               i64 ahead, i64 count, Range range, real* scores) {
    for (i64 k = range.begin; k < range.end; k += W) {
        vf dots[W];
        for (i64 i = 0; i < W; i++) {
            const real* key = (const real*)(keys + min_i64(k + i, count - 1) * row_bytes);
            vf dot = {};
            for (i64 d = 0; d < row_units; d += W) {
                __builtin_prefetch((const char*)(key + d) + ahead);
                MULTIPLY_ADD(dot, vf_load(query + d), vf_load(key + d));
            }
            dots[i] = dot;
        }
        vf_store(scores + k, sums_across(dots));
    }
}

// Where units of values are read from: packed ones [unit][lanes], or rows of the tensor.
struct ValueUnits {
    const char* data;
    i64 row_bytes;  // between units if packed, between rows otherwise
    i64 ahead;      // bytes to what is read some rows later, unless packed
};

INLINE void prefetch_unit(const ValueUnits& values, i64 unit, i64 d) {
    const char* row = values.data + unit * UNIT_ELEMENTS * values.row_bytes + values.ahead;
    for (i64 i = 0; i < UNIT_ELEMENTS; i++)
        __builtin_prefetch(row + i * values.row_bytes + d * (i64)sizeof(real) / UNIT_ELEMENTS);
}

// W lanes of a unit. Pairs of bfloat16 are put together from two rows of the tensor.
template <bool PACKED> INLINE vf load_unit(const ValueUnits& values, i64 unit, i64 d) {
#if BF16_PAIRS
    if (!PACKED) {
        const char* even = values.data + 2 * unit * values.row_bytes + 2 * d;
        v_u32 low = CONVERT(load_as<v_u16>(even), v_u32);
        v_u32 high = CONVERT(load_as<v_u16>(even + values.row_bytes), v_u32);
        return (vf)(low | high << 16);
    }
#endif
    return vf_load((const real*)(values.data + unit * values.row_bytes) + d);
}

// acc[r][lane] += probs[r][unit] * values[unit][lane] for four rows, or one. probs: units, of
// probs_row a row.
template <bool PACKED, int ROWS>
NOINLINE void add_values(const real* probs, i64 probs_row, const ValueUnits& values, Range units,
                         i64 lanes, real* acc) {
    i64 unit = units.begin;
    for (; unit + STEP <= units.end; unit += STEP) {
#define LOAD_WEIGHT(s, r) vf p##r##_##s = vf_set(probs[r % ROWS * probs_row + unit + s]);
#define LOAD_VALUE(s, _)                              \
    vf x##s = load_unit<PACKED>(values, unit + s, d); \
    if (!PACKED) prefetch_unit(values, unit + s, d);
#define ADD_VALUE(s, r) MULTIPLY_ADD(sum##r, p##r##_##s, x##s);
#define ADD_ROW(r)                                \
    if (r < ROWS) {                               \
        vf sum##r = vf_load(acc + r * lanes + d); \
        FOR_EACH_STEP(ADD_VALUE, r)               \
        vf_store(acc + r * lanes + d, sum##r);    \
    }
        FOR_EACH_ROW_STEP(LOAD_WEIGHT)
        for (i64 d = 0; d < lanes; d += W) {
            FOR_EACH_STEP(LOAD_VALUE, )
            FOR_EACH_ROW(ADD_ROW)
        }
    }
    for (; unit < units.end; unit++)
        for (i64 r = 0; r < ROWS; r++) {
            vf p = vf_set(probs[r * probs_row + unit]);
            for (i64 d = 0; d < lanes; d += W) {
                vf sum = vf_load(acc + r * lanes + d);
                MULTIPLY_ADD(sum, p, load_unit<PACKED>(values, unit, d));
                vf_store(acc + r * lanes + d, sum);
            }
        }
}

#endif
