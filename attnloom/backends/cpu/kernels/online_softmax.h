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

// What the kernel keeps of a tile of rows. mask: -1 where a score is live, read where `masked`.
struct SoftmaxState {
    real* scores;  // [rows][TILE_N]; afterwards the probabilities, unless BF16_PAIRS
    u16* pairs;    // [rows][TILE_N] bfloat16 probabilities, if BF16_PAIRS
    i8* mask;      // [rows][TILE_N]
    real* acc;
    real *m, *l;
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

// Scores of row i in score units, written back; returns the largest of them and m[i].
template <bool MASKED>
INLINE real score_row(const ModArgs& mods, const RowGroup& group, const TileColumn& column, i32 i,
                      i64 k0, Range columns, real scale, const SoftmaxState& state) {
    real* scores = state.scores + i * TILE_N;
    const i8* mask = state.mask + i * TILE_N;
    vf top = vf_set(state.m[i]);
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
        vf_store(scores + x, score);
        top = vf_max(score, top);
    }
    (void)mods, (void)group, (void)column, (void)k0, (void)mask;
    return vf_hmax(top);
}

// exp(score - m) of row i, for the next product; returns the sum.
INLINE real exponentiate_row(i32 i, Range columns, real m, const SoftmaxState& state) {
    real* scores = state.scores + i * TILE_N;
    u16* pairs = state.pairs + i * TILE_N;
    vf sum = {};
    for (i32 x = columns.begin; x < columns.end; x += W) {
        vf p = softmax_exp(vf_load(scores + x) - m);
        sum += p;
#if BF16_PAIRS
        store_as(pairs + x, bf16_rounded(p));
#else
        vf_store(scores + x, p);
#endif
    }
    (void)pairs;
    return vf_hsum(sum);
}

// Moves row i to a new maximum and adds the new probabilities' sum.
INLINE void advance_row(const SoftmaxState& state, i32 i, real m, real sum) {
    if (m != state.m[i]) {
        real shrink = softmax_exp(state.m[i] - m);
        real* acc = state.acc + i * state.value_lanes;
        for (i64 d = 0; d < state.value_lanes; d += W) vf_store(acc + d, vf_load(acc + d) * shrink);
        state.l[i] *= shrink;
        state.m[i] = m;
    }
    state.l[i] += sum;
}

// Applies scale, score_mod and mask to raw products and turns them into probabilities. Passes over
// a panel at a time let the processor overlap the rows' reductions, which are chains of latencies.
template <bool MASKED>
NOINLINE void softmax_rows(const ModArgs& mods, const RowGroup& group, const TileColumn& column,
                           i64 k0, const Range* panels, real scale, const SoftmaxState& state) {
    real tops[MR], sums[MR];
    for (i32 first = 0, p = 0; first < group.num_rows; first += MR, p++) {
        Range columns = panels[p];
        if (columns.begin >= columns.end) continue;
        i32 count = group.num_rows - first < MR ? group.num_rows - first : MR;
        for (i32 r = 0; r < count; r++)
            tops[r] = score_row<MASKED>(mods, group, column, first + r, k0, columns, scale, state);
        for (i32 r = 0; r < count; r++)
            sums[r] = exponentiate_row(first + r, columns, tops[r], state);
        for (i32 r = 0; r < count; r++) advance_row(state, first + r, tops[r], sums[r]);
    }
}

// acc += probabilities * values, units of values from the tile's first key on; num_keys keys exist.
INLINE void accumulate_values(i64 num_panels, const Range* panels, i64 num_keys,
                              const Right& values, const SoftmaxState& state) {
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
