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
#include "gemm.h"
#include "pack.h"
#include "parallel.h"
#include "softmax.h"
#include "tiles.h"

// Keys that already have the form GEMM reads are used where they are.
INLINE bool key_in_place(const AttentionArgs& args) {
    i64 own = REAL_IS_DOUBLE ? DTYPE_F64 : DTYPE_F32;
    return !BF16_PAIRS && args.key.dtype == own && args.head_dim % W == 0;
}

// Private to a worker. Of the two names of an operand, the second is the form with the query rows
// as depth; without BF16_PAIRS both are one buffer.
struct Scratch {
    real *keys, *values, *key_rows;  // packed tiles of the kv head, each made when first needed
    u8* packed;                      // [num_key_tiles]
    real *query, *query_right;       // [TILE_M][query_row], [TILE_M / UNIT_ELEMENTS][key_lanes]
    real *dout, *dout_right;         // [TILE_M][dout_row], [TILE_M / UNIT_ELEMENTS][value_lanes]
    real *probs, *dscores;           // [TILE_M][TILE_N]
    real *probs_right, *dscores_right;
    u16* dscores_pairs;
    i8* mask;
    real *dq, *dk, *dv;
    i64 used;

    Scratch(char* memory, const AttentionArgs& args, const Geometry& sizes) {
        Arena arena(memory);
        i64 tiles = sizes.num_key_tiles, row_units = TILE_M / UNIT_ELEMENTS;
        keys = arena.take<real>(tiles * sizes.key_units * TILE_N);
        values = arena.take<real>(tiles * sizes.value_units * TILE_N);
        key_rows = arena.take<real>(
            key_in_place(args) ? 0 : tiles * TILE_N / UNIT_ELEMENTS * sizes.key_lanes);
        packed = arena.take<u8>(tiles);
        query = query_right = arena.take<real>(TILE_M * round_up(sizes.key_units, W));
        dout = dout_right = arena.take<real>(TILE_M * round_up(sizes.value_units, W));
        probs = probs_right = arena.take<real>(TILE_M * TILE_N);
        dscores = dscores_right = arena.take<real>(TILE_M * TILE_N);
        dscores_pairs = arena.take<u16>(BF16_PAIRS ? TILE_M * TILE_N : 0);
        if (BF16_PAIRS) {
            query_right = arena.take<real>(row_units * sizes.key_lanes);
            dout_right = arena.take<real>(row_units * sizes.value_lanes);
            probs_right = arena.take<real>(row_units * TILE_N);
            dscores_right = arena.take<real>(row_units * TILE_N);
        }
        mask = arena.take<i8>(TILE_M * TILE_N);
        dq = arena.take<real>(TILE_M * sizes.key_lanes);
        dk = arena.take<real>(tiles * TILE_N * sizes.key_lanes);
        dv = arena.take<real>(tiles * TILE_N * sizes.value_lanes);
        used = arena.used;
    }
};

struct BackwardLayout {
    Geometry sizes;
    i64 num_chunks, num_tasks, num_lanes;
    i64 dk_size, dv_size;       // reals of a kv head's dK and dV
    real *dk_parts, *dv_parts;  // [num_tasks][...] with more than one chunk
    char* scratch;              // [workers][worker_bytes]
    i64 worker_bytes, total_bytes;

    explicit BackwardLayout(const AttentionArgs& args) : sizes(args) {
        num_chunks = args.head_chunks * args.row_chunks;
        num_tasks = args.Bkv * args.Hkv * num_chunks;
        num_lanes = min_i64(args.num_lanes, num_tasks);
        dk_size = sizes.num_key_tiles * TILE_N * sizes.key_lanes;
        dv_size = sizes.num_key_tiles * TILE_N * sizes.value_lanes;
        worker_bytes = Scratch(nullptr, args, sizes).used;
        Arena arena(args.workspace);
        i64 parts = num_chunks > 1 ? num_tasks : 0;
        dk_parts = arena.take<real>(parts * dk_size);
        dv_parts = arena.take<real>(parts * dv_size);
        scratch = arena.take<char>(min_i64(num_workers(args), num_lanes) * worker_bytes);
        total_bytes = arena.used;
    }
};

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
        pack_right(keys, 0, TILE_N, sizes.key_lanes,
                   task.scratch.key_rows + tile * TILE_N / UNIT_ELEMENTS * sizes.key_lanes);
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
        pack_right(query, 0, padded, sizes.key_lanes, scratch.query_right);
        pack_right(dout, 0, padded, sizes.value_lanes, scratch.dout_right);
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

// Turns raw products into P and dS (without the scale, which dQ and dK get at the end).
template <bool MASKED>
NOINLINE void differentiate_rows(const Task& task, const RowGroup& group, const TileColumn& column,
                                 HeadGrad& head_grad, i64 k0, const Range* panels,
                                 const RowStatistics& rows) {
    const ModArgs& mods = task.mods;
    const real scale = score_scale(task.args);
    for (i32 i = 0; i < group.num_rows; i++) {
        real* probs = task.scratch.probs + i * TILE_N;
        real* dscores = task.scratch.dscores + i * TILE_N;
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
static void clear_dead(const Scratch& scratch, i32 num_rows, i64 num_panels, const Range* panels,
                       Range all) {
    for (i32 i = 0; i < num_panels * MR; i++) {
        Range live = i < num_rows ? panels[i / MR] : Range{all.end, all.end};
        if (live.begin >= live.end) live = {all.end, all.end};
        for (i32 x = all.begin; x < all.end; x += W) {
            if (x >= live.begin && x < live.end) continue;
            vf_store(scratch.probs + i * TILE_N + x, (vf){});
            vf_store(scratch.dscores + i * TILE_N + x, (vf){});
        }
    }
}

#if BF16_PAIRS
// P and dS in bfloat16, as pairs of rows (operand with the rows as depth) and dS as pairs of
// columns.
static void round_tile(const Scratch& scratch, i64 num_rows, Range all) {
    for (i64 i = 0; i < num_rows; i += 2)
        for (i32 x = all.begin; x < all.end; x += W) {
            real *p = scratch.probs + i * TILE_N + x, *ds = scratch.dscores + i * TILE_N + x;
            i64 pair = i / 2 * TILE_N + x;
            v_u16 ds_even = bf16_rounded(vf_load(ds)), ds_odd = bf16_rounded(vf_load(ds + TILE_N));
            v_u16 p_even = bf16_rounded(vf_load(p)), p_odd = bf16_rounded(vf_load(p + TILE_N));
            store_as(scratch.probs_right + pair, CONVERT(p_even, v_u32) | CONVERT(p_odd, v_u32)
                                                                              << 16);
            store_as(scratch.dscores_right + pair, CONVERT(ds_even, v_u32) | CONVERT(ds_odd, v_u32)
                                                                                 << 16);
            store_as(scratch.dscores_pairs + i * TILE_N + x, ds_even);
            store_as(scratch.dscores_pairs + (i + 1) * TILE_N + x, ds_odd);
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

// The three products that add to dV, dK and dQ.
static void accumulate_tile(Task& task, i64 num_panels, const Range* panels, i64 k0) {
    const AttentionArgs& args = task.args;
    const i64 key_lanes = task.sizes.key_lanes, value_lanes = task.sizes.value_lanes;
    Scratch& scratch = task.scratch;
    Range key_panels[TILE_N / MR], depths[MAX_PANELS];
    transpose_ranges(num_panels, panels, key_panels);
    multiply_depths(TILE_N / MR, key_panels, value_lanes, {scratch.probs_right, 1, TILE_N},
                    {scratch.dout_right, value_lanes},
                    {scratch.dv + k0 * value_lanes, value_lanes});
    multiply_depths(TILE_N / MR, key_panels, key_lanes, {scratch.dscores_right, 1, TILE_N},
                    {scratch.query_right, key_lanes}, {scratch.dk + k0 * key_lanes, key_lanes});
    for (i64 p = 0; p < num_panels; p++) {
        i32 end = (i32)min_i64(panels[p].end, args.kv_len - k0);
        depths[p] = {panels[p].begin / UNIT_ELEMENTS, (i32)ceil_div(end, UNIT_ELEMENTS)};
    }
    Right keys = {scratch.key_rows + k0 / UNIT_ELEMENTS * key_lanes, key_lanes};
    if (key_in_place(args))
        keys = {(const real*)row_at(args.key, task.kv_b, task.kv_h, k0), args.key.stride_row};
    const real* dscores = BF16_PAIRS ? (const real*)scratch.dscores_pairs : scratch.dscores;
    multiply_depths(num_panels, depths, key_lanes, {dscores, TILE_N / UNIT_ELEMENTS, 1}, keys,
                    {scratch.dq, key_lanes});
}

static void differentiate_tile(Task& task, const RowGroup& group, HeadGrad& head_grad,
                               const RowStatistics& rows, const KeyTile& tile) {
    const Geometry& sizes = task.sizes;
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
    const i64 key_units = sizes.key_units, value_units = sizes.value_units;
    multiply_columns(num_panels, panels, key_units, {scratch.query, round_up(key_units, W), 1},
                     scratch.keys + tile.index * key_units * TILE_N, scratch.probs);
    multiply_columns(num_panels, panels, value_units, {scratch.dout, round_up(value_units, W), 1},
                     scratch.values + tile.index * value_units * TILE_N, scratch.dscores);
    TileColumn column;
    enter_keys(task.mods, group, k0, column);
    auto differentiate = tile.masked ? differentiate_rows<true> : differentiate_rows<false>;
    differentiate(task, group, column, head_grad, k0, panels, rows);
    Range all = {tile.begin, (i32)round_up(tile.end, W)};
    clear_dead(scratch, group.num_rows, num_panels, panels, all);
#if BF16_PAIRS
    round_tile(scratch, num_panels * MR, all);
#endif
    accumulate_tile(task, num_panels, panels, k0);
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

// Shares of a kv head's gradient: `count` of them, `size` reals apart, rows of `lanes` reals.
struct Shares {
    real* first;
    i64 count, size, lanes;
};

// target[keys] = factor * sum of the shares, added in order.
static void write_sum(const Operand& target, i64 kv_b, i64 kv_h, Span keys, i64 row_size,
                      const Shares& shares, real factor) {
    for (i64 k = keys.begin; k < keys.end; k++) {
        real* row = shares.first + k * shares.lanes;
        for (i64 share = 1; share < shares.count; share++)
            for (i64 d = 0; d < shares.lanes; d += W)
                vf_store(row + d, vf_load(row + d) + vf_load(row + share * shares.size + d));
        store_row(row_at(target, kv_b, kv_h, k), target.dtype, row_size, row, factor);
    }
}

static void write_key_gradients(const AttentionArgs& args, const BackwardLayout& layout,
                                i64 kv_head, Span keys, real* dk, real* dv) {
    i64 b = kv_head / args.Hkv, h = kv_head % args.Hkv, count = layout.num_chunks;
    write_sum(args.dk, b, h, keys, args.head_dim,
              {dk, count, layout.dk_size, layout.sizes.key_lanes}, (real)args.scale);
    write_sum(args.dv, b, h, keys, args.value_dim,
              {dv, count, layout.dv_size, layout.sizes.value_lanes}, 1);
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
