// Forward of fused attention: out = softmax(score_mod(scale * Q K^T)) V over the live tiles.
//
//   kv head     one (batch, head) of key and value          wave    kv heads packed at a time
//   row tile    up to TILE_M query rows of one query head   packed  see pack.h
//
// Parallelisation: a first region packs the live key tiles of a wave, transposed, and its values; a
// second one computes row tiles, longest list first, each drawn by the next free thread. A wave is
// bounded in bytes, so that memory does not grow with batch and heads.
#include "gemm.h"
#include "live_keys.h"
#include "online_softmax.h"
#include "pack.h"
#include "parallel.h"
#include "sequences.h"
#include "tiles.h"

// Packed bytes of a wave; tests make it small. Matrix tiles wait for memory more than for each
// other, so that what is packed should still lie in the second-level cache (5%).
#ifndef WAVE_BYTES
#define WAVE_BYTES (MATRIX_TILES ? 1 << 20 : 32 << 20)
#endif

// Values that already have the form GEMM reads are used where they are; pages shorter than a tile
// one by one, where so few rows read them that a copy would not pay (128 rows: 1.5x).
#define FEW_READERS 256

INLINE bool value_in_place(const AttentionArgs& args) {
    i64 own = REAL_IS_DOUBLE ? DTYPE_F64 : DTYPE_F32;
    bool whole = !args.pages || args.page_size >= TILE_N;  // a tile is one piece of memory
    bool pays = whole || query_heads_per_kv(args) * args.q_len <= FEW_READERS;
    return !BF16_PAIRS && args.value.dtype == own && args.value_dim % W == 0 && pays;
}

struct ForwardLayout {
    Geometry sizes;
    i64 wave_heads, num_kv_heads, tasks_per_head;
    i64 key_tile, value_tile, query_row;  // reals
    real *keys, *values;                  // [wave_heads][num_key_tiles][...]
    u8* live;                             // [wave_heads][num_key_tiles]
    i32* order;                           // [wave_heads * tasks_per_head]
    char* scratch;                        // [workers][worker_bytes]
    i64 worker_bytes, total_bytes;

    explicit ForwardLayout(const AttentionArgs& args) : sizes(args) {
        num_kv_heads = args.Bkv * args.Hkv;
        tasks_per_head = query_heads_per_kv(args) * sizes.num_row_tiles;
        key_tile = sizes.key_units * TILE_N;
        value_tile =
            value_in_place(args) ? 0 : Packed::size(TILE_N / UNIT_ELEMENTS, sizes.value_lanes);
        query_row = round_up(sizes.key_units, W);
        i64 head_bytes =
            max_i64(1, sizes.num_key_tiles * (key_tile + value_tile) * (i64)sizeof(real));
        i64 fitting = max_i64(num_workers(args), WAVE_BYTES / head_bytes);
        wave_heads = min_i64(num_kv_heads, fitting);
        worker_bytes = Scratch(nullptr, *this).used;
        Arena arena(args.workspace);
        keys = arena.take<real>(wave_heads * sizes.num_key_tiles * key_tile);
        values = arena.take<real>(wave_heads * sizes.num_key_tiles * value_tile);
        live = arena.take<u8>(wave_heads * sizes.num_key_tiles);
        order = arena.take<i32>(wave_heads * tasks_per_head);
        scratch = arena.take<char>(num_workers(args) * worker_bytes);
        total_bytes = arena.used;
    }

    // Private to a worker.
    struct Scratch {
        real *query, *scores, *acc;
        u16* pairs;
        i8* mask;
        i64 used;

        Scratch(char* memory, const ForwardLayout& layout) {
            Arena arena(memory);
            query = arena.take<real>(TILE_M * layout.query_row);
            scores = arena.take<real>(TILE_M * TILE_N);
            acc = arena.take<real>(TILE_M * layout.sizes.value_lanes);
            pairs = arena.take<u16>(BF16_PAIRS ? TILE_M * TILE_N : 0);
            mask = arena.take<i8>(TILE_M * TILE_N);
            used = arena.used;
        }
    };
};

// The query head and row tile of task `t` of a kv head: queries at positions q0 .. q0 + num_rows of
// their sequence. Tiles lie on a grid of positions, so that none crosses a block of the mask.
struct RowTask {
    QueryHead head;
    AttentionArgs here;
    i64 q0, num_rows;

    RowTask(const AttentionArgs& args, const Geometry& sizes, i64 kv_head, i64 t)
        : head(query_head(args, kv_head, t / sizes.num_row_tiles)),
          here(of_sequence(args, head.b)) {
        i64 origin = args.row_offsets ? here.q_start / sizes.tile_m * sizes.tile_m : here.q_start;
        i64 first = origin + t % sizes.num_row_tiles * sizes.tile_m;
        q0 = max_i64(first, here.q_start);
        num_rows = min_i64(first + sizes.tile_m, here.q_start + here.num_queries) - q0;
    }
};

// Marks the key tiles that some row of the wave reads, and sorts its tasks by falling work.
static void plan_wave(const AttentionArgs& args, const ForwardLayout& layout, i64 first_head,
                      i64 num_heads) {
    const Geometry& sizes = layout.sizes;
    i64 num_tasks = num_heads * layout.tasks_per_head;
    if (!args.row_offsets) {
        for (i64 t = 0; t < num_heads * sizes.num_key_tiles; t++) layout.live[t] = 1;
        for (i64 t = 0; t < num_tasks; t++) layout.order[t] = (i32)t;
        return;
    }
    __builtin_memset(layout.live, 0, num_heads * sizes.num_key_tiles);
    const i64 num_buckets = 256;
    i64 starts[num_buckets + 1] = {};
    i64 most = 1 + sizes.num_key_tiles * max_i64(1, TILE_N / args.kv_block);
    // Two passes of a counting sort; bucket 0 holds the longest lists.
    for (int pass = 0; pass < 2; pass++) {
        Span marked = {-1, -1};  // of the last task, whose list the next may share
        i64 marked_head = -1;
        for (i64 t = 0; t < num_tasks; t++) {
            i64 head = t / layout.tasks_per_head;
            RowTask task(args, sizes, first_head + head, t % layout.tasks_per_head);
            Span steps = {0, 0};
            if (task.num_rows > 0) steps = key_steps(args, task.head.b, task.head.h, task.q0);
            i64 work = min_i64(steps.end - steps.begin, most - 1);
            i64 bucket = (most - 1 - work) * num_buckets / most;
            if (pass == 1) {
                layout.order[starts[bucket]++] = (i32)t;
                continue;
            }
            starts[bucket + 1]++;
            bool is_shared = steps.begin == marked.begin && steps.end == marked.end;
            if (is_shared && marked_head == head && !args.lengths) continue;
            marked = steps;
            marked_head = head;
            KeyTiles tiles(task.here, steps.begin, steps.end);
            for (KeyTile tile; tiles.next(tile);)
                layout.live[head * sizes.num_key_tiles + tile.index] = 1;
        }
        if (pass == 0)
            for (i64 i = 0; i < num_buckets; i++) starts[i + 1] += starts[i];
    }
}

static void pack_tile(const AttentionArgs& args, const ForwardLayout& layout, i64 first_head,
                      i64 task) {
    const Geometry& sizes = layout.sizes;
    if (!layout.live[task]) return;
    i64 kv_head = first_head + task / sizes.num_key_tiles, tile = task % sizes.num_key_tiles;
    i64 b = kv_head / args.Hkv, h = kv_head % args.Hkv, k0 = tile * TILE_N;
    i64 count = min_i64(TILE_N, stored_length(args, b) - k0);
    auto pack_keys = [&](i64 begin, i64 end, const Rows& rows) {
        pack_transposed(rows, begin, end, layout.keys + task * layout.key_tile);
    };
    auto pack_values = [&](i64 begin, i64 end, const Rows& rows) {
        pack_right(rows, begin, end, TILE_N / UNIT_ELEMENTS, sizes.value_lanes,
                   layout.values + task * layout.value_tile);
    };
    for_each_piece(args, args.key, b, h, k0, count, args.head_dim, pack_keys);
    if (!layout.value_tile) return;
#if MATRIX_TILES
    // Products take 32 keys at a time, of which pages may hold fewer.
    if (args.pages && count > 0)
        __builtin_memset(layout.values + task * layout.value_tile, 0,
                         layout.value_tile * sizeof(real));
#endif
    for_each_piece(args, args.value, b, h, k0, count, args.value_dim, pack_values);
}

// only: of each row, whether it is written; null: all are.
static void write_rows(const AttentionArgs& args, const RowGroup& group, const SoftmaxState& state,
                       const bool* only) {
    i64 q0 = group.q0 - args.q_start, row = (group.b * args.Hq + group.h) * args.q_len + q0;
    for (i32 i = 0; i < group.num_rows; i++) {
        if (only && !only[i]) continue;
        real m = state.m[i], l = state.l[i];
        store_row(row_at(args.out, group.b, group.h, q0 + i), args.out.dtype, args.value_dim,
                  state.acc + i * state.value_lanes, l == 0 ? (real)0 : 1 / l);
        args.lse[row + i] = row_lse(m, l);
        if (args.max_scores) args.max_scores[row + i] = row_max(m, l);
        write_state(args, row + i, m, l);
    }
}

// One row tile of one query head: head number `head` of a wave.
struct RowTile {
    const AttentionArgs& args;
    const ForwardLayout& layout;
    const ModArgs& mods;
    const RowGroup& group;
    const ForwardLayout::Scratch& scratch;
    const SoftmaxState& state;
    i64 head, kv_b, kv_h;
};

// acc += P V of one key tile.
static void accumulate_tile(const RowTile& rows, const KeyTile& tile, const Range* columns) {
    const AttentionArgs& args = rows.args;
    const ForwardLayout& layout = rows.layout;
    i64 k0 = tile.index * TILE_N;
    i64 packed = rows.head * layout.sizes.num_key_tiles + tile.index;
    const real* values = layout.values + packed * layout.value_tile;
    i64 value_row = layout.sizes.value_lanes, num_panels = ceil_div(rows.group.num_rows, MR);
    i64 num_keys = min_i64(TILE_N, args.kv_len - k0);
    if (layout.value_tile) {
        accumulate_values(num_panels, columns, num_keys,
                          {values, TILE_N / UNIT_ELEMENTS, value_row}, rows.state);
        return;
    }
    value_row = args.value.stride_row;
    i64 step = args.pages ? min_i64(args.page_size, TILE_N) : TILE_N;
    for (i64 first = 0; first < num_keys; first += step) {
        Range piece[MAX_PANELS];
        bool is_live = false;
        for (i64 p = 0; p < num_panels; p++) {
            i64 begin = max_i64(columns[p].begin, first);
            i64 end = max_i64(begin, min_i64(columns[p].end, first + step));
            piece[p] = {(i32)begin, (i32)end};
            is_live |= begin < end;
        }
        if (!is_live) continue;
        // as if all of the tile lay around the page
        values = (const real*)key_row(args, args.value, rows.kv_b, rows.kv_h, k0 + first);
        accumulate_values(num_panels, piece, num_keys,
                          {values - first * value_row, TILE_N / UNIT_ELEMENTS, value_row},
                          rows.state);
    }
}

// A row tile against all its live key tiles; returns whether they hide keys.
// only: null, or of each row whether it is summed, key by key.
static bool visit_keys(const RowTile& rows, const bool* only) {
    const AttentionArgs& args = rows.args;
    const Geometry& sizes = rows.layout.sizes;
    const RowGroup& group = rows.group;
    const SoftmaxState& state = rows.state;
    i64 num_panels = ceil_div(group.num_rows, MR), query_row = rows.layout.query_row;
    bool hides_keys = false;
    Range columns[MAX_PANELS];
    TileColumn column;
    state.reset(num_panels * MR);
    Span steps = key_steps(args, group.b, group.h, group.q0);
    KeyTiles tiles(args, steps.begin, steps.end);
    for (KeyTile tile; tiles.next(tile);) {
        i64 k0 = tile.index * TILE_N, packed = rows.head * sizes.num_key_tiles + tile.index;
        hides_keys |= tile.hides_keys();
        if (tile.masked) {
            fill_mask(args, rows.mods, group, tile, state.mask);
            if (!live_columns(tile, state.mask, group.num_rows, columns)) continue;
        } else {
            for (i64 p = 0; p < num_panels; p++) columns[p] = {tile.begin, tile.end};
        }
        multiply_columns(num_panels, columns, sizes.key_units,
                         {rows.scratch.query, query_row, 1},
                         rows.layout.keys + packed * rows.layout.key_tile, state.scores);
        enter_keys(rows.mods, group, k0, column);
        auto softmax = tile.masked ? softmax_rows<true> : softmax_rows<false>;
        softmax(rows.mods, group, column, k0, columns, score_scale(args), state);
        if (only)
            add_live_values(args, {rows.kv_b, rows.kv_h, k0}, tile.masked, columns, only,
                            group.num_rows, state);
        else
            accumulate_tile(rows, tile, columns);
    }
    return hides_keys;
}

static void attend(const AttentionArgs& whole, const ForwardLayout& layout, i64 worker,
                   i64 first_head, i64 task) {
    const Geometry& sizes = layout.sizes;
    i64 head = task / layout.tasks_per_head, kv_head = first_head + head;
    RowTask place(whole, sizes, kv_head, task % layout.tasks_per_head);
    if (place.num_rows <= 0) return;
    const AttentionArgs& args = place.here;
    ForwardLayout::Scratch scratch(layout.scratch + worker * layout.worker_bytes, layout);
    ModArgs mods = mod_args(args, nullptr);
    RowGroup group;
    enter_head(mods, place.head.b, place.head.h, group);
    enter_rows(args, mods, place.q0, place.num_rows, group);
    i64 row = place.q0 - args.q_start;
    pack_units(Rows(args.query, place.head.b, place.head.h, row, place.num_rows, args.head_dim),
               0, round_up(place.num_rows, MR), layout.query_row, scratch.query);

    real m[TILE_M + W], l[TILE_M + W];
    SoftmaxState state = {scratch.scores,   scratch.pairs, scratch.mask, scratch.acc, m, l,
                          sizes.value_lanes};
    RowTile rows = {args, layout, mods, group, scratch, state, head,
                    kv_head / args.Hkv, kv_head % args.Hkv};
    bool spoilt[TILE_M];
    bool hides_keys = visit_keys(rows, nullptr);
    write_rows(args, group, state, nullptr);
    if (hides_keys && find_spoilt(state.acc, sizes.value_lanes, group.num_rows, spoilt)) {
        visit_keys(rows, spoilt);
        write_rows(args, group, state, spoilt);
    }
}

extern "C" i64 attnloom_workspace(const AttentionArgs* args) {
    return ForwardLayout(*args).total_bytes;
}

// Returns 1 if the launcher has to run the build with WIDE_INTS instead.
extern "C" i64 attnloom_run(const AttentionArgs* given) {
    const AttentionArgs& args = *given;
    ForwardLayout layout(args);
    int overflow = 0;
    for (i64 first = 0; first < layout.num_kv_heads; first += layout.wave_heads) {
        i64 heads = min_i64(layout.wave_heads, layout.num_kv_heads - first);
        plan_wave(args, layout, first, heads);
        run_tasks(args, heads * layout.sizes.num_key_tiles,
                  [&](i64, i64 task) { pack_tile(args, layout, first, task); });
        overflow |= run_tasks(args, heads * layout.tasks_per_head, [&](i64 worker, i64 task) {
            attend(args, layout, worker, first, layout.order[task]);
        });
    }
    return overflow;
}
