// Backward of fused attention: five matrix products a tile, probabilities recomputed.
//
//   P = exp(S - m) / l        dP = dO V^T              dS = P * (dP - delta), through the score_mod
//   dV += P^T dO              dK += dS^T Q             dQ += dS K
//   delta = rowsum(out * dO) - dlse
//
// m and l are a row's largest score and sum of exponentials; without them, lse and 1. lse is as
// coarse as a float of its size, and S - lse as one of the distance to it: in float32 they cost a
// sixth of the accuracy for scores of unit variance, and two fifths of dV's for scores of hundreds.
//
// Parallelisation: a task is one kv head and a share of its query rows (head_chunks x row_chunks);
// it keeps dK and dV of that head in private memory. With one share they are the result; otherwise
// a second region adds the shares in order. So nothing is added atomically and every sum has one
// order: the gradients are bitwise equal from run to run. Grouped heads need nothing special.
//
// Gradients of captured tensors go to private buffers too, one set a lane. A lane runs its tasks
// (lane, lane + num_lanes, ...) in order; the launcher adds the lanes.
#include "backward_memory.h"
#include "live_keys.h"
#include "softmax.h"

// What is constant while a task walks its rows.
struct Task {
    const AttentionArgs& args;
    const Geometry& sizes;
    ModArgs mods;
    Scratch scratch;
    i64 kv_b, kv_h;
};

static void pack_key_tile(Task& task, i64 tile) {
    if (task.scratch.packed[tile]) return;
    task.scratch.packed[tile] = 1;
    const AttentionArgs& args = task.args;
    const Geometry& sizes = task.sizes;
    i64 k0 = tile * TILE_N, count = min_i64(TILE_N, args.kv_len - k0);
    Rows keys(args.key, task.kv_b, task.kv_h, k0, count, args.head_dim);
    Rows values(args.value, task.kv_b, task.kv_h, k0, count, args.value_dim);
    pack_transposed(keys, 0, TILE_N, task.scratch.keys + tile * sizes.key_units * TILE_N);
    pack_transposed(values, 0, TILE_N, task.scratch.values + tile * sizes.value_units * TILE_N);
    if (!key_in_place(args))
        pack_right(keys, 0, TILE_N, TILE_N / UNIT_ELEMENTS, sizes.key_lanes,
                   task.scratch.key_rows +
                       tile * Packed::size(TILE_N / UNIT_ELEMENTS, sizes.key_lanes));
}

// P = exp(score - shift) * factor; shift is +inf for an empty row, whose probabilities thus are 0.
struct RowStatistics {
    real shift[TILE_M], factor[TILE_M], delta[TILE_M];
};

#if BF16_PAIRS
// rowsum(out * dO) of the group's rows.
static void sum_deltas(const Task& task, const RowGroup& group, real* delta) {
    const AttentionArgs& args = task.args;
    Rows out(args.out, group.b, group.h, group.q0, group.num_rows, args.value_dim);
    Rows dout(args.dout, group.b, group.h, group.q0, group.num_rows, args.value_dim);
    for (i64 i = 0; i < group.num_rows; i++) {
        vf sum = {};
        for (i64 d = 0; d < args.value_dim; d += W)
            sum += load_lanes(out[i], out.dtype, d, out.size) *
                   load_lanes(dout[i], dout.dtype, d, dout.size);
        delta[i] = vf_hsum(sum);
    }
}
#else
// rowsum(out * dO) of the group's rows, each in the order of dP's products: where one key has all
// of a row, out is its value, and dP - delta is 0 to the last bit. Rows are lanes, in transposed
// pieces.
static void sum_deltas(const Task& task, const RowGroup& group, real* delta) {
    const AttentionArgs& args = task.args;
    real *out = task.scratch.probs, *dout = task.scratch.dscores;  // free between tiles
    i64 padded = round_up(group.num_rows, W);
    vf sums[TILE_M / W] = {};
    for (i64 first = 0; first < args.value_dim; first += TILE_M) {
        i64 size = min_i64(TILE_M, args.value_dim - first);
        auto transpose = [&](const Operand& operand, real* packed) {
            const char* start = row_at(operand, group.b, group.h, group.q0);
            start += first * element_bytes(operand.dtype);
            pack_transposed(Rows(operand, start, group.num_rows, size), 0, padded, packed);
        };
        transpose(args.out, out);
        transpose(args.dout, dout);
        for (i64 d = 0; d < size; d++)
            for (i64 i = 0; i < padded; i += W)
                sums[i / W] += vf_load(dout + d * TILE_N + i) * vf_load(out + d * TILE_N + i);
    }
    for (i64 i = 0; i < padded; i += W) vf_store(delta + i, sums[i / W]);
}
#endif

static void enter_tile(Task& task, const RowGroup& group, RowStatistics& rows) {
    const AttentionArgs& args = task.args;
    const Geometry& sizes = task.sizes;
    Scratch& scratch = task.scratch;
    i64 count = group.num_rows, padded = round_up(count, MR);
    Rows query(args.query, group.b, group.h, group.q0, count, args.head_dim);
    Rows dout(args.dout, group.b, group.h, group.q0, count, args.value_dim);
    pack_units(query, 0, padded, round_up(sizes.key_units, W), scratch.query);
    pack_units(dout, 0, padded, round_up(sizes.value_units, W), scratch.dout);
    if (BF16_PAIRS) {
        const i64 units = TILE_M / UNIT_ELEMENTS;
        pack_right(query, 0, padded, units, sizes.key_lanes, scratch.query_right);
        pack_right(dout, 0, padded, units, sizes.value_lanes, scratch.dout_right);
#if MATRIX_TILES
        transpose_packed(padded / UNIT_ELEMENTS, units, sizes.key_lanes, scratch.query_right,
                         scratch.query_columns);
        transpose_packed(padded / UNIT_ELEMENTS, units, sizes.value_lanes, scratch.dout_right,
                         scratch.dout_columns);
#endif
    }
    sum_deltas(task, group, rows.delta);
    i64 first = (group.b * args.Hq + group.h) * args.q_len + group.q0;
    const real *state = args.row_state, *sums = state + args.B * args.Hq * args.q_len;
    for (i64 i = 0; i < count; i++) {
        bool empty = args.lse[first + i] == -REAL_INF;
        rows.shift[i] = empty ? REAL_INF : state ? state[first + i] : args.lse[first + i];
        rows.factor[i] = state && !empty ? 1 / sums[first + i] : 1;
        if (args.dlse) rows.delta[i] -= args.dlse[first + i];
        if (empty) rows.delta[i] = 0;
    }
    __builtin_memset(scratch.dq, 0, padded * sizes.key_lanes * sizeof(real));
}

// Turns raw products of some rows into P and dS (without the scale: dQ and dK get it at the end).
template <bool MASKED>
NOINLINE void differentiate_rows(const Task& task, const RowGroup& group, const TileColumn& column,
                                 HeadGrad& head_grad, i64 k0, const Range* panels,
                                 const RowStatistics& rows, Range part) {
    const ModArgs& mods = task.mods;
    const real scale = score_scale(task.args);
    for (i32 i = part.begin; i < part.end && i < group.num_rows; i++) {
        real* probs = task.scratch.probs + (i - part.begin) * TILE_N;
        real* dscores = task.scratch.dscores + (i - part.begin) * TILE_N;
        const i8* mask = task.scratch.mask + i * TILE_N;
        real shift = rows.shift[i], factor = rows.factor[i], delta = rows.delta[i];
        Range columns = panels[i / MR];
        for (i32 x = columns.begin; x < columns.end; x += W) {
            vf raw = rounded(vf_load(probs + x) * scale), score = raw;
            vm live = MASKED ? vm_from_bytes(load_as<v_i8>(mask + x)) : vm_set(true);
#if HAS_SCORE
            score = score_mod(mods, group.head, group.rows[i], column, group.b, group.h,
                              group.q0 + i, k0 + x, x, raw);
#endif
            vf p = softmax_exp(rounded(score) - shift) * factor;
            if (MASKED) p = vf_select(live, p, (vf){});
            vf dscore = p * (vf_load(dscores + x) - delta);
            if (MASKED) dscore = vf_select(live, dscore, (vf){});
#if HAS_SCORE
            dscore = score_grad(mods, group.head, group.rows[i], column, head_grad, group.b,
                                group.h, group.q0 + i, k0 + x, x, raw, dscore, live);
            if (MASKED) dscore = vf_select(live, dscore, (vf){});
#endif
            vf_store(probs + x, p);
            vf_store(dscores + x, dscore);
        }
    }
    (void)mods, (void)column, (void)head_grad, (void)k0;
}

// Zero P and dS where a panel's columns end before the tile's, and in rows that only pad.
static void clear_dead(const Scratch& scratch, i32 num_rows, Range part, const Range* panels,
                       Range all) {
    for (i32 i = part.begin; i < part.end; i++) {
        Range live = i < num_rows ? panels[i / MR] : Range{all.end, all.end};
        if (live.begin == all.begin && live.end == all.end) continue;
        if (live.begin >= live.end) live = {all.end, all.end};
        for (i32 x = all.begin; x < all.end; x += W) {
            if (x >= live.begin && x < live.end) continue;
            vf_store(scratch.probs + (i - part.begin) * TILE_N + x, (vf){});
            vf_store(scratch.dscores + (i - part.begin) * TILE_N + x, (vf){});
        }
    }
}

#if BF16_PAIRS
// P and dS of some rows in bfloat16, as pairs of rows (operand with the rows as depth) and dS as
// pairs of columns.
static void round_rows(const Scratch& scratch, Range part, Range all) {
    for (i64 i = part.begin; i < part.end; i += 2)
        for (i32 x = all.begin; x < all.end; x += W) {
            const i64 from = (i - part.begin) * TILE_N + x;
            const real *p = scratch.probs + from, *ds = scratch.dscores + from;
            i64 pair = Packed::offset(TILE_M / UNIT_ELEMENTS, TILE_N, i / 2, x);
            v_bf16_rows p_rows = bf16_rounded(vf_load(p), vf_load(p + TILE_N));
            v_bf16_rows ds_rows = bf16_rounded(vf_load(ds), vf_load(ds + TILE_N));
            store_as(scratch.probs_right + pair, pairs_of(p_rows));
            store_as(scratch.dscores_right + pair, pairs_of(ds_rows));
            v_u16 halves[2];
            __builtin_memcpy(halves, &ds_rows, sizeof(halves));
            store_as(scratch.dscores_pairs + i * TILE_N + x, halves[0]);
            store_as(scratch.dscores_pairs + (i + 1) * TILE_N + x, halves[1]);
        }
}
#endif

// Rows that each panel of MR keys needs, from the columns that each panel of MR rows needs.
static void transpose_ranges(i64 num_panels, const Range* panels, Range* key_panels) {
    for (i32 k = 0; k < TILE_N / MR; k++) {
        i32 first = (i32)num_panels, last = 0;
        for (i32 p = 0; p < num_panels; p++)
            if (panels[p].begin < (k + 1) * MR && panels[p].end > k * MR) {
                first = first < p ? first : p;
                last = p + 1;
            }
        key_panels[k] = {first * MR / UNIT_ELEMENTS, last * MR / UNIT_ELEMENTS};
    }
}

// dQ += dS K, of the keys that each row sees.
static void add_live_keys_to_dq(const Task& task, const RowGroup& group, const Range* panels,
                                const KeyTile& tile) {
    const Scratch& scratch = task.scratch;
    for (i32 i = 0; i < group.num_rows; i++) {
        const i8* mask = tile.masked ? scratch.mask + i * TILE_N : nullptr;
#if BF16_PAIRS
        const u16* weights = scratch.dscores_pairs + i * TILE_N;
#else
        const real* weights = scratch.dscores + i * TILE_N;
#endif
        add_live_keys(task.args, task.args.key, {task.kv_b, task.kv_h, tile.index * TILE_N},
                      task.args.head_dim, panels[i / MR], weights, mask,
                      scratch.dq + i * task.sizes.key_lanes);
    }
}

// The products that add to dV and dK.
static void accumulate_keys(Task& task, i64 num_panels, const Range* panels, i64 tile) {
    const i64 k0 = tile * TILE_N, row_units = TILE_M / UNIT_ELEMENTS;
    const i64 key_lanes = task.sizes.key_lanes, value_lanes = task.sizes.value_lanes;
    Scratch& scratch = task.scratch;
    Range key_panels[TILE_N / MR];
    transpose_ranges(num_panels, panels, key_panels);
#if MATRIX_TILES
    multiply_strips(TILE_N / MR, key_panels, value_lanes, {scratch.dout_columns, row_units, 1},
                    {scratch.probs_right, row_units, TILE_N}, scratch.dv + k0 * value_lanes);
    multiply_strips(TILE_N / MR, key_panels, key_lanes, {scratch.query_columns, row_units, 1},
                    {scratch.dscores_right, row_units, TILE_N}, scratch.dk + k0 * key_lanes);
#else
    multiply_depths(TILE_N / MR, key_panels, value_lanes, {scratch.probs_right, 1, TILE_N},
                    {scratch.dout_right, row_units, value_lanes},
                    {scratch.dv + k0 * value_lanes, value_lanes});
    multiply_depths(TILE_N / MR, key_panels, key_lanes, {scratch.dscores_right, 1, TILE_N},
                    {scratch.query_right, row_units, key_lanes},
                    {scratch.dk + k0 * key_lanes, key_lanes});
#endif
}

// dQ += dS K.
static void accumulate_queries(Task& task, i64 num_panels, const Range* panels, i64 tile) {
    const i64 k0 = tile * TILE_N, key_lanes = task.sizes.key_lanes;
    const AttentionArgs& args = task.args;
    Scratch& scratch = task.scratch;
    Range depths[MAX_PANELS];
    for (i64 p = 0; p < num_panels; p++) {
        i32 end = (i32)min_i64(panels[p].end, args.kv_len - k0);
        depths[p] = {panels[p].begin / UNIT_ELEMENTS, (i32)ceil_div(end, UNIT_ELEMENTS)};
    }
    const i64 key_units = TILE_N / UNIT_ELEMENTS;
    Packed keys = {scratch.key_rows + tile * Packed::size(key_units, key_lanes), key_units,
                   key_lanes};
    if (key_in_place(args))
        keys = {(const real*)row_at(args.key, task.kv_b, task.kv_h, k0), key_units,
                args.key.stride_row};
    const real* dscores = BF16_PAIRS ? (const real*)scratch.dscores_pairs : scratch.dscores;
    multiply_depths(num_panels, depths, key_lanes, {dscores, TILE_N / UNIT_ELEMENTS, 1}, keys,
                    {scratch.dq, key_lanes});
}

// S and dP of some rows, whole panels.
static void multiply_part(const Task& task, i64 tile, const Range* panels, Range part) {
    const Scratch& scratch = task.scratch;
    const i64 key_units = task.sizes.key_units, value_units = task.sizes.value_units;
    const i64 first = part.begin / MR, count = part.end / MR - first;
    const Left query = {scratch.query, round_up(key_units, W), 1};
    const Left dout = {scratch.dout, round_up(value_units, W), 1};
    multiply_columns(count, panels + first, key_units, query.at(part.begin, 0),
                     scratch.keys + tile * key_units * TILE_N, scratch.probs);
    multiply_columns(count, panels + first, value_units, dout.at(part.begin, 0),
                     scratch.values + tile * value_units * TILE_N, scratch.dscores);
}

static void differentiate_tile(Task& task, const RowGroup& group, HeadGrad& head_grad,
                               const RowStatistics& rows, const KeyTile& tile) {
    Scratch& scratch = task.scratch;
    i64 k0 = tile.index * TILE_N, num_panels = ceil_div(group.num_rows, MR);
    Range panels[MAX_PANELS];
    if (tile.masked) {
        fill_mask(task.args, task.mods, group, tile, scratch.mask);
        if (!live_columns(tile, scratch.mask, group.num_rows, panels)) return;
    } else {
        for (i64 p = 0; p < num_panels; p++) panels[p] = {tile.begin, tile.end};
    }
    pack_key_tile(task, tile.index);
    TileColumn column;
    enter_keys(task.mods, group, k0, column);
    auto differentiate = tile.masked ? differentiate_rows<true> : differentiate_rows<false>;
    const i32 whole = MATRIX_TILES ? STRIP : W;
    bool spoilt = false;
    Range all = {tile.begin / whole * whole, (i32)round_up(tile.end, whole)};
    for (i32 first = 0; first < num_panels * MR; first += ROWS_AT_ONCE) {
        Range part = {first, (i32)min_i64(first + ROWS_AT_ONCE, num_panels * MR)};
        multiply_part(task, tile.index, panels, part);
        if (tile.hides_keys()) spoilt |= find_spoilt_keys(scratch.probs, panels, part);
        differentiate(task, group, column, head_grad, k0, panels, rows, part);
        clear_dead(scratch, group.num_rows, part, panels, all);
#if BF16_PAIRS
        round_rows(scratch, part, all);
#endif
    }
    accumulate_keys(task, num_panels, panels, tile.index);
    if (spoilt)
        add_live_keys_to_dq(task, group, panels, tile);
    else
        accumulate_queries(task, num_panels, panels, tile.index);
}

static void differentiate_head(Task& task, RowGroup& group, i64 first_tile, i64 step) {
    const AttentionArgs& args = task.args;
    HeadGrad head_grad;
#if HAS_CAPTURED_GRAD
    head_grad_begin(head_grad);
#endif
    RowStatistics rows;
    for (i64 row_tile = first_tile; row_tile < task.sizes.num_row_tiles; row_tile += step) {
        i64 q0 = row_tile * task.sizes.tile_m;
        enter_rows(args, task.mods, q0, min_i64(task.sizes.tile_m, args.q_len - q0), group);
        enter_tile(task, group, rows);
        Span steps = key_steps(args, group.b, group.h, q0);
        KeyTiles tiles(args, steps.begin, steps.end);
        for (KeyTile tile; tiles.next(tile);)
            differentiate_tile(task, group, head_grad, rows, tile);
        for (i64 i = 0; i < group.num_rows; i++)
            store_row(row_at(args.dq, group.b, group.h, q0 + i), args.dq.dtype, args.head_dim,
                      task.scratch.dq + i * task.sizes.key_lanes, (real)args.scale);
    }
#if HAS_CAPTURED_GRAD
    head_grad_flush(task.mods, group.head, head_grad, group.b, group.h);
#endif
}

static void run_task(const AttentionArgs& args, const BackwardLayout& layout, i64 worker, i64 lane,
                     i64 number) {
    i64 kv_head = number / layout.num_chunks, chunk = number % layout.num_chunks;
    i64 head_chunk = chunk / args.row_chunks, row_chunk = chunk % args.row_chunks;
    real* const* grads = args.grads ? args.grads + lane * args.num_tensors : nullptr;
    Task task = {args,
                 layout.sizes,
                 mod_args(args, grads),
                 Scratch(layout.scratch + worker * layout.worker_bytes, args, layout.sizes),
                 kv_head / args.Hkv,
                 kv_head % args.Hkv};
    bool split = layout.num_chunks > 1;
    if (split) {
        task.scratch.dk = layout.dk_parts + number * layout.dk_size;
        task.scratch.dv = layout.dv_parts + number * layout.dv_size;
    }
    __builtin_memset(task.scratch.packed, 0, layout.sizes.num_key_tiles);
    __builtin_memset(task.scratch.dk, 0, layout.dk_size * sizeof(real));
    __builtin_memset(task.scratch.dv, 0, layout.dv_size * sizeof(real));
    RowGroup group;
    for (i64 index = head_chunk; index < query_heads_per_kv(args); index += args.head_chunks) {
        QueryHead head = query_head(args, kv_head, index);
        enter_head(task.mods, head.b, head.h, group);
        differentiate_head(task, group, row_chunk, args.row_chunks);
    }
    if (!split)
        write_key_gradients(args, layout, kv_head, {0, args.kv_len}, task.scratch.dk,
                            task.scratch.dv);
}

extern "C" i64 attnloom_workspace(const AttentionArgs* args) {
    return BackwardLayout(*args).total_bytes;
}

// Returns 1 if the launcher has to run the build with WIDE_INTS instead.
extern "C" i64 attnloom_run(const AttentionArgs* given) {
    const AttentionArgs& args = *given;
    BackwardLayout layout(args);
    int overflow = run_tasks(args, layout.num_lanes, [&](i64 worker, i64 lane) {
        for (i64 number = lane; number < layout.num_tasks; number += layout.num_lanes)
            run_task(args, layout, worker, lane, number);
    });
    if (layout.num_chunks > 1) {
        i64 tiles = layout.sizes.num_key_tiles;
        run_tasks(args, args.Bkv * args.Hkv * tiles, [&](i64, i64 number) {
            i64 kv_head = number / tiles, k0 = number % tiles * TILE_N,
                first = kv_head * layout.num_chunks;
            write_key_gradients(args, layout, kv_head, {k0, min_i64(k0 + TILE_N, args.kv_len)},
                                layout.dk_parts + first * layout.dk_size,
                                layout.dv_parts + first * layout.dv_size);
        });
    }
    return overflow;
}
