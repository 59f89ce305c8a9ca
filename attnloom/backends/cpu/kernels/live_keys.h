// Sums over the keys that a row sees, and no others: for rows that a masked key has spoilt.
//
// A product over a tile adds 0 times the row of each masked key, which is NaN where that row holds
// NaN or infinity. It shows in the result, which costs nothing to look at; such rows, of which there
// are none in nearly all calls, are summed again, key by key.
#ifndef ATTNLOOM_LIVE_KEYS_H
#define ATTNLOOM_LIVE_KEYS_H

#include "online_softmax.h"
#include "pack.h"
#include "sequences.h"

NOINLINE bool all_finite(const real* row, i64 lanes) {
    vf sums[4] = {};  // chains, so that none waits for its own last addition
    i64 d = 0;
    for (; d + 4 * W <= lanes; d += 4 * W)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sums[i] += vf_load(row + d + i * W) * (real)0;
    for (; d < lanes; d += W) sums[0] += vf_load(row + d) * (real)0;
    return vf_hsum((sums[0] + sums[1]) + (sums[2] + sums[3])) == 0;
}

// Rows to sum again; returns whether there are any.
INLINE bool find_spoilt(const real* rows, i64 lanes, i32 num_rows, bool* spoilt) {
    if (all_finite(rows, num_rows * lanes)) return false;
    for (i32 i = 0; i < num_rows; i++) spoilt[i] = !all_finite(rows + i * lanes, lanes);
    return true;
}

// Whether a key of a tile may spoil products with it, as its row holds NaN or infinity: so do then
// its raw products with all queries, [part][TILE_N], of which one a panel is looked at.
INLINE bool find_spoilt_keys(const real* products, const Range* panels, Range part) {
    vf sum = {};
    for (i32 first = part.begin; first < part.end; first += MR, products += MR * TILE_N) {
        Range columns = panels[first / MR];
        if (columns.begin >= columns.end) continue;
        // Products with dS may be as deep as strips.
        i32 begin = columns.begin / STRIP * STRIP, end = (i32)round_up(columns.end, STRIP);
        for (i32 x = begin; x < end; x += W) sum += vf_load(products + x) * (real)0;
    }
    return vf_hsum(sum) != 0;
}

struct KeyPlace {
    i64 kv_b, kv_h, k0;  // the first key of a tile
};

INLINE real weight_of(real weight) { return weight; }
INLINE real weight_of(u16 weight) { return (real)f32_from_bf16(weight); }

// target[0:size] += sum of weights[x] * row of the tile's key x, over the columns that the mask
// (null: all) keeps. Lanes beyond the size get zeros.
template <class Weight>
NOINLINE void add_live_keys(const AttentionArgs& args, const Operand& keys, const KeyPlace& place,
                            i64 size, Range columns, const Weight* weights, const i8* mask,
                            real* target) {
    i32 end = (i32)min_i64(columns.end, args.kv_len - place.k0);
    for (i64 d = 0; d < size; d += W) {
        vf sum = {};
        for (i32 x = columns.begin; x < end; x++) {
            if (mask && !mask[x]) continue;
            const char* row = key_row(args, keys, place.kv_b, place.kv_h, place.k0 + x);
            sum += weight_of(weights[x]) * load_lanes(row, keys.dtype, d, size);
        }
        vf_store(target + d, vf_load(target + d) + sum);
    }
}

// acc += P V of the rows that `only` names. panels: the columns of each panel of MR rows.
NOINLINE void add_live_values(const AttentionArgs& args, const KeyPlace& place, bool masked,
                            const Range* panels, const bool* only, i32 num_rows,
                            const SoftmaxState& state) {
    for (i32 i = 0; i < num_rows; i++) {
        if (!only[i]) continue;
        const i8* mask = masked ? state.mask + i * TILE_N : nullptr;
        real* acc = state.acc + i * state.value_lanes;
#if BF16_PAIRS
        const u16* weights = state.pairs + i * TILE_N;
#else
        const real* weights = state.scores + i * TILE_N;
#endif
        add_live_keys(args, args.value, place, args.value_dim, panels[i / MR], weights, mask, acc);
    }
}

#endif
