// Online softmax over one tile of scores (Milakov and Gimelshein 2018, arXiv:1805.02867; tiled as
// in FlashAttention, Dao et al. 2022, arXiv:2205.14135). Shared by the forward and the decode
// kernel.
//
//   m[i]   largest score of row i so far, starting from the lowest finite number, so that
//          score - m is never -inf + inf: hidden scores are -inf and get probability 0
//   l[i]   sum of exp(score - m[i])
//   acc    [rows][value_lanes], sum of exp(score - m[i]) * value
#ifndef ATTNLOOM_ONLINE_SOFTMAX_H
#define ATTNLOOM_ONLINE_SOFTMAX_H

#include "softmax.h"
#include "tiles.h"
#include "transpose.h"

// What the kernel keeps of a tile of rows. mask: -1 where a score is live, read where `masked`.
struct SoftmaxState {
    real* scores;  // [rows][TILE_N]; afterwards the probabilities, but not with BF16_PAIRS
    u16* pairs;    // [rows][TILE_N] bfloat16 probabilities, if BF16_PAIRS
    i8* mask;      // [rows][TILE_N]
    real* acc;
    real *m, *l;  // a vector more than there are rows
    i64 value_lanes;

    // The same state from row `first` on.
    SoftmaxState from_row(i64 first) const {
        return {scores + first * TILE_N,
                pairs + first * TILE_N,
                mask + first * TILE_N,
                acc + first * value_lanes,
                m + first,
                l + first,
                value_lanes};
    }
    void reset(i64 num_rows) const {
        for (i64 i = 0; i < num_rows; i++) m[i] = REAL_LOWEST, l[i] = 0;
        __builtin_memset(acc, 0, num_rows * value_lanes * sizeof(real));
    }
    const real* probabilities() const { return BF16_PAIRS ? (const real*)pairs : scores; }
};
// Reals between rows of probabilities().
static const i64 PROBABILITY_ROW = TILE_N / UNIT_ELEMENTS;

// Without a score_mod, bfloat16 tiles keep raw products, and scale and log2(e) are one factor: what
// this costs in accuracy (softmax.h) lies far below the rounding of the inputs.
#define FOLDED (BF16_PAIRS && !HAS_SCORE)

// Brings the scores of row i to natural units and hides those that the mask hides; returns a vector
// whose largest lane is the largest of them. FOLDED scores without a mask stay as they are.
template <bool MASKED>
INLINE vf score_row(const ModArgs& mods, const RowGroup& group, const TileColumn& column, i32 i,
                    i64 k0, Range columns, real scale, const SoftmaxState& state) {
    real* scores = state.scores + i * TILE_N;
    const i8* mask = state.mask + i * TILE_N;
    vf top = vf_set(REAL_LOWEST);
    for (i32 x = columns.begin; x < columns.end; x += W) {
        vf score = rounded(vf_load(scores + x) * scale);
#if HAS_SCORE
        score = score_mod(mods, group.head, group.rows[i], column, group.b, group.h, group.q0 + i,
                          k0 + x, x, score);
#endif
        if (MASKED) {
            vm live = vm_from_bytes(load_as<v_i8>(mask + x));
            score = vf_select(live, score, vf_set(-REAL_INF));
        }
        if (MASKED || !FOLDED) vf_store(scores + x, score);
        top = vf_max(score, top);
    }
    (void)mods, (void)group, (void)column, (void)k0, (void)mask;
    return top;
}

// exp(score - m), of scores in units of `scale`.
template <bool MASKED> INLINE vf probability(vf score, real scale, real m) {
#if FOLDED
    // A row that sees nothing yet has the lowest m, which must not become infinite.
    real shift = m * LOG2_E;
    if (shift < REAL_LOWEST) shift = REAL_LOWEST;
    return exp2_lanes(score * (MASKED ? LOG2_E : scale * LOG2_E) - shift);
#else
    (void)scale;
    return softmax_exp(score - m);
#endif
}

// exp(score - m) of row i, for the next product; returns a vector whose lanes add up to their sum.
template <bool MASKED>
INLINE vf exponentiate_row(i32 i, Range columns, real scale, real m, const SoftmaxState& state) {
    real* scores = state.scores + i * TILE_N;
    u16* pairs = state.pairs + i * TILE_N;
    vf sum = {};
    i32 x = columns.begin;
#if BF16_PAIRS
    for (; x + 2 * W <= columns.end; x += 2 * W) {
        vf p = probability<MASKED>(vf_load(scores + x), scale, m);
        vf next = probability<MASKED>(vf_load(scores + x + W), scale, m);
        sum += p + next;
        store_as(pairs + x, bf16_rounded(p, next));
    }
#endif
    for (; x < columns.end; x += W) {
        vf p = probability<MASKED>(vf_load(scores + x), scale, m);
        sum += p;
#if BF16_PAIRS
        store_as(pairs + x, bf16_rounded(p));
#else
        vf_store(scores + x, p);
#endif
    }
#if BF16_AMX
    // Products take 32 keys at a time.
    for (x = columns.begin / STRIP * STRIP; x < columns.begin; x += W)
        store_as(pairs + x, (v_u16){});
    for (x = columns.end; x % STRIP; x += W) store_as(pairs + x, (v_u16){});
#endif
    (void)pairs;
    return sum;
}

INLINE void scale_row(const SoftmaxState& state, i64 i, real factor) {
    real* acc = state.acc + i * state.value_lanes;
    for (i64 d = 0; d < state.value_lanes; d += W) vf_store(acc + d, vf_load(acc + d) * factor);
}

// Largest lane and sum of each of the first `count` vectors; a few are reduced one by one.
INLINE vf row_maxima(vf* rows, i32 count) {
    if (count > 3) return maxima_across(rows);
    vf maxima = vf_set(REAL_LOWEST);
    for (i32 r = 0; r < count; r++) maxima[r] = vf_hmax(rows[r]);
    return maxima;
}
INLINE vf row_sums(vf* rows, i32 count) {
    if (count > 3) return sums_across(rows);
    vf sums = {};
    for (i32 r = 0; r < count; r++) sums[r] = vf_hsum(rows[r]);
    return sums;
}

// Applies scale, score_mod and mask to raw products and turns them into probabilities, W rows at a
// time, whose maxima and sums are reduced together. Rows of a panel without columns keep what they
// have.
template <bool MASKED>
NOINLINE void softmax_rows(const ModArgs& mods, const RowGroup& group, const TileColumn& column,
                           i64 k0, const Range* panels, real scale, const SoftmaxState& state) {
    for (i32 first = 0; first < group.num_rows; first += W) {
        const i32 count = group.num_rows - first < W ? group.num_rows - first : W;
        vf rows[W];
        real shrinks[W];
        for (i32 r = 0; r < W; r++)
            rows[r] = r < count ? score_row<MASKED>(mods, group, column, first + r, k0,
                                                    panels[(first + r) / MR], scale, state)
                                : vf_set(REAL_LOWEST);
        vf before = vf_load(state.m + first), m = vf_max(row_maxima(rows, count), before);
        vf_store(state.m + first, m);
        vf shrink = softmax_exp(before - m);
        vf_store(shrinks, shrink);
        for (i32 r = 0; r < W; r++)
            rows[r] = r < count ? exponentiate_row<MASKED>(first + r, panels[(first + r) / MR],
                                                           scale, state.m[first + r], state)
                                : (vf){};
        vf sums = row_sums(rows, count);
        vf_store(state.l + first, vf_load(state.l + first) * shrink + sums);
        for (i32 r = 0; r < count; r++)
            if (shrinks[r] != 1) scale_row(state, first + r, shrinks[r]);
    }
}

// acc += probabilities * values, units of values from the tile's first key on; num_keys keys exist.
INLINE void accumulate_values(i64 num_panels, const Range* panels, i64 num_keys,
                              const Packed& values, const SoftmaxState& state) {
    Range depths[MAX_PANELS];
    for (i64 p = 0; p < num_panels; p++) {
        i32 end = (i32)min_i64(panels[p].end, num_keys);
        depths[p] = {panels[p].begin / UNIT_ELEMENTS, (i32)ceil_div(end, UNIT_ELEMENTS)};
    }
    multiply_depths(num_panels, depths, state.value_lanes,
                    {state.probabilities(), PROBABILITY_ROW, 1}, values,
                    {state.acc, state.value_lanes});
}

// Natural logarithm of the sum of exponentials; -inf for a row without live scores.
INLINE real row_lse(real m, real l) {
    return l == 0 ? -REAL_INF : m + natural_log(l);
}
// What the backward gets of a row beyond its lse.
INLINE void write_state(const AttentionArgs& args, i64 row, real m, real l) {
    if (!args.row_state) return;
    args.row_state[row] = m;
    args.row_state[args.B * args.Hq * args.q_len + row] = l;
}
// Largest score in natural units; NaN where a score was.
INLINE real row_max(real m, real l) { return l == 0 ? -REAL_INF : l != l ? l : m; }

#endif
