// Decode: attention of a few query rows over many keys, the keys split over threads.
//
//   unit    `fold` query heads of one kv head, with all their q_len rows, at most TILE_M; over a
//           cache those of them that lie in one block of the mask
//   part    one of num_splits shares of the unit's live tiles (flash-decoding, Dao et al. 2023)
//
// Rows of grouped heads share every key they load (few_rows.h). A first region computes the parts,
// a second one combines them in order.
#define MR 4
#include "few_rows.h"
#include "gemm.h"
#include "live_keys.h"
#if BF16_AMX
#include "few_rows_amx.h"
#endif
#include "online_softmax.h"
#include "pack.h"
#include "parallel.h"
#include "sequences.h"
#include "tiles.h"

struct DecodeLayout {
    Geometry sizes;
    i64 num_chunks, num_units, num_rows, part_size;
    real* parts;  // [num_units][num_splits][num_rows][m, l, then acc in value_lanes]
    char* scratch;
    i64 worker_bytes, total_bytes;

    explicit DecodeLayout(const AttentionArgs& args) : sizes(args) {
        // Queries that stand anywhere touch two blocks, of at least TILE_M each.
        num_chunks = args.lengths && args.row_offsets && args.q_len > 1 ? 2 : 1;
        num_units = args.B * args.Hq / args.fold * num_chunks;
        num_rows = args.fold * args.q_len;
        part_size = num_rows * row_size();
        worker_bytes = Scratch(nullptr, sizes).used;
        Arena arena(args.workspace);
        parts = arena.take<real>(num_units * args.num_splits * part_size);
        scratch = arena.take<char>(num_workers(args) * worker_bytes);
        total_bytes = arena.used;
    }
    // Padded, so that acc keeps the vectors' alignment.
    i64 row_size() const { return sizes.value_lanes + W; }

    // Private to a worker.
    struct Scratch {
        real *query, *query_columns;  // [TILE_M][row_units], and [row_units][TILE_M] for tiles
        real *keys, *values, *scores, *acc;
        u16* pairs;
        i8* mask;
        i64 used;

        Scratch(char* memory, const Geometry& sizes) {
            Arena arena(memory);
            query = arena.take<real>(TILE_M * round_up(sizes.key_units, W));
            query_columns =
                arena.take<real>(BF16_AMX ? TILE_M * round_up(sizes.key_units, W) : 0);
            keys = arena.take<real>(round_up(sizes.key_units, W) * TILE_N);
            values = arena.take<real>(sizes.value_lanes * TILE_N / UNIT_ELEMENTS);
            scores = arena.take<real>(TILE_M * TILE_N);
            acc = arena.take<real>(TILE_M * sizes.value_lanes);
            pairs = arena.take<u16>(BF16_PAIRS ? TILE_M * TILE_N : 0);
            mask = arena.take<i8>(TILE_M * TILE_N);
            used = arena.used;
        }
    };
};

// Heads and queries of a unit: query rows q_begin .. q_begin + num_queries of `fold` heads.
struct UnitPlace {
    AttentionArgs here;
    i64 b, first_head, kv_b, kv_h, q_begin, num_queries;

    UnitPlace(const AttentionArgs& args, const DecodeLayout& layout, i64 number)
        : here(of_sequence(args, number / layout.num_chunks / (args.Hq / args.fold))) {
        i64 units_per_batch = args.Hq / args.fold, chunk = number % layout.num_chunks;
        number /= layout.num_chunks;
        b = number / units_per_batch;
        first_head = number % units_per_batch * args.fold;
        kv_b = args.Bkv == args.B ? b : 0;
        kv_h = first_head / (args.Hq / args.Hkv);
        i64 first = 0, last = here.num_queries;
        if (layout.num_chunks > 1) {
            i64 boundary = args.q_block - here.q_start % args.q_block;
            first = chunk ? min_i64(boundary, last) : 0;
            last = chunk ? last : min_i64(boundary, last);
        }
        q_begin = first;
        num_queries = last - first;
    }
    i64 position() const { return here.q_start + q_begin; }
    i64 num_rows() const { return here.fold * num_queries; }
};

// Row r of the tile is query r % num_queries of head r / num_queries.
struct Unit : UnitPlace {
    RowGroup heads[TILE_M];

    Unit(const AttentionArgs& args, const DecodeLayout& layout, const ModArgs& mods, i64 number)
        : UnitPlace(args, layout, number) {
        for (i64 g = 0; g < args.fold; g++) {
            enter_head(mods, b, first_head + g, heads[g]);
            enter_rows(args, mods, position(), num_queries, heads[g]);
        }
    }
};

// Live columns of a masked tile, the same for all panels; false if there are none.
static bool mask_tile(const AttentionArgs& args, const ModArgs& mods, const Unit& unit,
                      const KeyTile& tile, i32 num_rows, i8* mask, Range& columns) {
    Range panels[MAX_PANELS];
    for (i64 g = 0; g < args.fold; g++)
        fill_mask(args, mods, unit.heads[g], tile, mask + g * unit.num_queries * TILE_N);
    if (!live_columns(tile, mask, num_rows, panels)) return false;
    columns = {TILE_N, 0};
    for (i32 p = 0; p * MR < num_rows; p++) {
        if (panels[p].begin >= panels[p].end) continue;
        columns.begin = panels[p].begin < columns.begin ? panels[p].begin : columns.begin;
        columns.end = panels[p].end > columns.end ? panels[p].end : columns.end;
    }
    return true;
}

#if BF16_AMX
// As below, on matrix tiles.
static void score_on_tiles(const AttentionArgs& args, const DecodeLayout& layout,
                           const Unit& unit, i64 k0, i64 count, Range columns,
                           const DecodeLayout::Scratch& scratch) {
    i64 row_units = round_up(layout.sizes.key_units, W);
    auto score_piece = [&](i64 begin, i64 end, const Rows& keys) {
        Range whole = {(i32)max_i64(begin, columns.begin / W * W),
                       (i32)min_i64(end, round_up(columns.end, W))};
        dot_keys_on_tiles(scratch.query_columns, row_units, keys, whole, unit.num_rows(),
                          scratch.keys, scratch.scores);
    };
    for_each_piece(args, args.key, unit.kv_b, unit.kv_h, k0, count, args.head_dim, score_piece);
}

// As below, on matrix tiles. Keys that do not exist, or are in no piece, count as zeros.
static void value_on_tiles(const AttentionArgs& args, const DecodeLayout& layout,
                           const Unit& unit, i64 k0, i64 count, Range columns,
                           const DecodeLayout::Scratch& scratch, const SoftmaxState& state) {
    const i64 lanes = layout.sizes.value_lanes, units = TILE_N / UNIT_ELEMENTS;
    const i64 first = columns.begin / 32 * 32, last = min_i64(count, round_up(columns.end, 32));
    if (last % 32)
        __builtin_memset(scratch.values + last / 32 * 16 * lanes, 0, 16 * lanes * sizeof(real));
    auto pack_piece = [&](i64 begin, i64 end, const Rows& values) {
        if (end <= first || begin >= last) return;
        // Two rows at a time, in step with what is asked for.
        for (i64 i = begin; i < end; i += 2) {
            for (i64 d = 0; d < values.size; d += 32) {
                __builtin_prefetch(values[i] + values.ahead + d * 2);
                __builtin_prefetch(values[i + 1] + values.ahead + d * 2);
            }
            pack_right(values, i, i + 2, units, lanes, scratch.values);
        }
    };
    for_each_piece(args, args.value, unit.kv_b, unit.kv_h, k0, count, args.value_dim, pack_piece);
    Range depth = {columns.begin / UNIT_ELEMENTS, (i32)ceil_div(last, UNIT_ELEMENTS)};
    add_values_on_tiles(state.probabilities(), PROBABILITY_ROW, scratch.values, depth, lanes,
                        state.acc);
}
#endif

// scores = Q K^T for the columns of a tile. Keys in the tensor's own form are read in place.
static void score_tile(const AttentionArgs& args, const DecodeLayout& layout, const Unit& unit,
                       i64 k0, i64 count, Range columns, const DecodeLayout::Scratch& scratch) {
    i64 row_units = round_up(layout.sizes.key_units, W);
    bool in_place = args.key.dtype == OWN_DTYPE && args.head_dim % (W * UNIT_ELEMENTS) == 0;
    auto score_piece = [&](i64 begin, i64 end, const Rows& keys) {
        if (!in_place) pack_units(keys, begin, end, row_units, scratch.keys);
        const char* data = in_place ? keys.data : (const char*)scratch.keys;
        i64 row_bytes = in_place ? keys.bytes_between : row_units * (i64)sizeof(real);
        Range whole = {(i32)max_i64(begin, columns.begin / W * W),
                       (i32)min_i64(end, round_up(columns.end, W))};
        for (i64 r = 0; r < unit.num_rows(); r += MR) {
            auto dot = unit.num_rows() - r == 1 ? dot_keys_one_row : dot_keys;
            dot(scratch.query + r * row_units, row_units, data, row_bytes, keys.ahead, keys.count,
                whole, scratch.scores + r * TILE_N);
        }
    };
    for_each_piece(args, args.key, unit.kv_b, unit.kv_h, k0, count, args.head_dim, score_piece);
}

// acc += P V for the columns of a tile.
static void value_tile(const AttentionArgs& args, const DecodeLayout& layout, const Unit& unit,
                       i64 k0, i64 count, Range columns, const DecodeLayout::Scratch& scratch,
                       const SoftmaxState& state) {
    i64 lanes = layout.sizes.value_lanes;
    bool own = args.value.dtype == OWN_DTYPE && args.value_dim % W == 0;
    auto add_piece = [&](i64 begin, i64 end, const Rows& values) {
        bool whole_units = !BF16_PAIRS || values.count % 2 == 0;
        bool in_place = own && whole_units;
        if (!in_place)
            pack_right(values, begin, end, TILE_N / UNIT_ELEMENTS, lanes, scratch.values);
        ValueUnits source = {in_place ? values.data : (const char*)scratch.values,
                             in_place ? values.bytes_between : lanes * (i64)sizeof(real),
                             args.pages ? values.ahead : values.ahead / 2};
        end = min_i64(columns.end, values.count);
        Range units = {(i32)max_i64(begin, columns.begin) / UNIT_ELEMENTS,
                       (i32)ceil_div(end, UNIT_ELEMENTS)};
        for (i64 r = 0; r < unit.num_rows(); r += MR) {
            auto add = unit.num_rows() - r == 1
                           ? in_place ? add_values<false, 1> : add_values<true, 1>
                       : in_place ? add_values<false, 4>
                                  : add_values<true, 4>;
            add(state.probabilities() + r * PROBABILITY_ROW, PROBABILITY_ROW, source, units, lanes,
                state.acc + r * lanes);
        }
    };
    for_each_piece(args, args.value, unit.kv_b, unit.kv_h, k0, count, args.value_dim, add_piece);
}

// only: null, or of each row whether its values are added, key by key.
static void attend_tile(const AttentionArgs& args, const DecodeLayout& layout, const ModArgs& mods,
                        const Unit& unit, const KeyTile& tile, Range columns, const bool* only,
                        const DecodeLayout::Scratch& scratch, const SoftmaxState& state) {
    i64 k0 = tile.index * TILE_N, count = min_i64(TILE_N, args.kv_len - k0);
#if BF16_AMX
    const bool on_tiles = unit.num_rows() > MR;
    auto score = on_tiles ? score_on_tiles : score_tile;
    auto add = on_tiles ? value_on_tiles : value_tile;
#else
    auto score = score_tile;
    auto add = value_tile;
#endif
    score(args, layout, unit, k0, count, columns, scratch);
    Range panels[MAX_PANELS];
    for (Range& panel : panels) panel = columns;
    auto softmax = tile.masked ? softmax_rows<true> : softmax_rows<false>;
    for (i64 g = 0; g < args.fold; g++) {
        TileColumn column;
        enter_keys(mods, unit.heads[g], k0, column);
        softmax(mods, unit.heads[g], column, k0, panels, score_scale(args),
                state.from_row(g * unit.num_queries));
    }
    if (only)
        add_live_values(args, {unit.kv_b, unit.kv_h, k0}, tile.masked, panels, only,
                        (i32)unit.num_rows(), state);
    else
        add(args, layout, unit, k0, count, columns, scratch, state);
}

// One split of a unit's live key tiles; returns whether they hide keys. only: as for attend_tile.
static bool visit_keys(const AttentionArgs& args, const DecodeLayout& layout, const ModArgs& mods,
                       const Unit& unit, i64 split, const bool* only,
                       const DecodeLayout::Scratch& scratch, const SoftmaxState& state) {
    state.reset(BF16_AMX ? TILE_M : round_up(unit.num_rows(), MR));
    bool hides_keys = false;
    Span steps = key_steps(args, unit.b, unit.first_head, unit.position());
    i64 count = steps.end - steps.begin;
    KeyTiles tiles(args, steps.begin + count * split / args.num_splits,
                   steps.begin + count * (split + 1) / args.num_splits);
    for (KeyTile tile; tiles.next(tile);) {
        Range columns = {tile.begin, tile.end};
        hides_keys |= tile.hides_keys();
        if (tile.masked &&
            !mask_tile(args, mods, unit, tile, (i32)unit.num_rows(), state.mask, columns))
            continue;
        attend_tile(args, layout, mods, unit, tile, columns, only, scratch, state);
    }
    return hides_keys;
}

// What a split found of the rows that `only` names, or of all, to its part.
static void write_part(const DecodeLayout& layout, i64 task, i64 num_rows, const bool* only,
                       const SoftmaxState& state) {
    for (i64 r = 0; r < num_rows; r++) {
        if (only && !only[r]) continue;
        real* part = layout.parts + task * layout.part_size + r * layout.row_size();
        part[0] = state.m[r];
        part[1] = state.l[r];
        __builtin_memcpy(part + W, state.acc + r * layout.sizes.value_lanes,
                         layout.sizes.value_lanes * sizeof(real));
    }
}

static void attend_part(const AttentionArgs& whole, const DecodeLayout& layout, i64 worker,
                        i64 task) {
    const Geometry& sizes = layout.sizes;
    i64 split = task % whole.num_splits;
    ModArgs mods = mod_args(whole, nullptr);
    Unit unit(whole, layout, mods, task / whole.num_splits);
    const AttentionArgs& args = unit.here;
    i64 num_rows = unit.num_rows();
    i64 padded = BF16_AMX ? TILE_M : round_up(num_rows, MR);
    if (num_rows == 0) return;
    DecodeLayout::Scratch scratch(layout.scratch + worker * layout.worker_bytes, sizes);
    i64 row_units = round_up(sizes.key_units, W);
    for (i64 g = 0; g < args.fold; g++)
        pack_units(Rows(args.query, unit.b, unit.first_head + g, unit.q_begin, unit.num_queries,
                        args.head_dim),
                   0, unit.num_queries, row_units,
                   scratch.query + g * unit.num_queries * row_units);
    __builtin_memset(scratch.query + num_rows * row_units, 0,
                     (padded - num_rows) * row_units * sizeof(real));
#if BF16_AMX
    transpose(TILE_M, row_units, scratch.query, row_units, scratch.query_columns, TILE_M);
#endif
    real m[TILE_M + W], l[TILE_M + W];
    SoftmaxState state = {scratch.scores,   scratch.pairs, scratch.mask, scratch.acc, m, l,
                          sizes.value_lanes};
    bool spoilt[TILE_M];
    bool hides_keys = visit_keys(args, layout, mods, unit, split, nullptr, scratch, state);
    write_part(layout, task, num_rows, nullptr, state);
    if (hides_keys && find_spoilt(state.acc, sizes.value_lanes, (i32)num_rows, spoilt)) {
        visit_keys(args, layout, mods, unit, split, spoilt, scratch, state);
        write_part(layout, task, num_rows, spoilt, state);
    }
}

// Adds the parts of one row of a unit, in order, into the first of them.
static void combine_row(const AttentionArgs& args, const DecodeLayout& layout, i64 unit,
                        const UnitPlace& place, i64 r) {
    i64 b = place.b, h = place.first_head + r / place.num_queries;
    i64 q = place.q_begin + r % place.num_queries;
    real* parts = layout.parts + unit * args.num_splits * layout.part_size + r * layout.row_size();
    real m = REAL_LOWEST, l = 0;
    for (i64 split = 0; split < args.num_splits; split++)
        m = parts[split * layout.part_size] > m ? parts[split * layout.part_size] : m;
    for (i64 split = 0; split < args.num_splits; split++) {
        real* part = parts + split * layout.part_size;
        real shrink = softmax_exp(part[0] - m);
        l += part[1] * shrink;
        for (i64 d = 0; d < layout.sizes.value_lanes; d += W) {
            vf scaled = vf_load(part + W + d) * shrink;
            vf_store(parts + W + d, split ? vf_load(parts + W + d) + scaled : scaled);
        }
    }
    store_row(row_at(args.out, b, h, q), args.out.dtype, args.value_dim, parts + W,
              l == 0 ? (real)0 : 1 / l);
    i64 row = (b * args.Hq + h) * args.q_len + q;
    args.lse[row] = row_lse(m, l);
    if (args.max_scores) args.max_scores[row] = row_max(m, l);
    write_state(args, row, m, l);
}

extern "C" i64 attnloom_workspace(const AttentionArgs* args) {
    return DecodeLayout(*args).total_bytes;
}

// Returns 1 if the launcher has to run the build with WIDE_INTS instead.
extern "C" i64 attnloom_run(const AttentionArgs* given) {
    const AttentionArgs& args = *given;
    DecodeLayout layout(args);
    int overflow = run_tasks(args, layout.num_units * args.num_splits, [&](i64 worker, i64 task) {
        attend_part(args, layout, worker, task);
    });
    run_tasks(args, layout.num_units, [&](i64, i64 unit) {
        UnitPlace place(args, layout, unit);
        for (i64 r = 0; r < place.num_rows(); r++) combine_row(args, layout, unit, place, r);
    });
    return overflow;
}
