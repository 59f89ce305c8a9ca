// Copies tiles of a tensor into the forms that GEMM reads, converting on the way, and rows back.
//
//   units        [row][unit of the depth]          operand A: rows as they are
//   rows         [row][lane], zero padded          operand B with one element a unit
//   row pairs    [row / 2][lane] of (even, odd)    operand B with BF16_PAIRS
//   transposed   [unit of the depth][TILE_N]       operand B of the scores: keys become columns
//
// where an operand B is in strips on matrix tiles (Packed in gemm.h).
//
// Whatever lies beyond a tensor's rows or elements is zero in the packed form.
#ifndef ATTNLOOM_PACK_H
#define ATTNLOOM_PACK_H

#include "gemm.h"
#include "transpose.h"

// W elements from `offset` of a row of `size` elements, converted; zero beyond its end.
INLINE vf load_lanes(const char* row, i64 dtype, i64 offset, i64 size) {
    if (offset + W <= size) {
        if (dtype == DTYPE_BF16)
            return CONVERT(f32_from_bf16(load_as<v_u16>(row + offset * 2)), vf);
        if (dtype == DTYPE_F16) return CONVERT(f32_from_f16(load_as<v_u16>(row + offset * 2)), vf);
        if (dtype == DTYPE_F32) return CONVERT(load_as<v_f32>(row + offset * 4), vf);
        if (dtype == DTYPE_E4M3) return CONVERT(f32_from_e4m3(load_as<v_u8>(row + offset)), vf);
        if (dtype == DTYPE_E5M2) return CONVERT(f32_from_e5m2(load_as<v_u8>(row + offset)), vf);
        return CONVERT(load_as<v_f64>(row + offset * 8), vf);
    }
    vf lanes = {};
    for (i64 i = 0; i < W && offset + i < size; i++) {
        const char* p = row + (offset + i) * element_bytes(dtype);
        if (dtype == DTYPE_BF16)
            lanes[i] = f32_from_bf16(load_as<u16>(p));
        else if (dtype == DTYPE_F16)
            lanes[i] = f32_from_f16(load_as<u16>(p));
        else if (dtype == DTYPE_F32)
            lanes[i] = load_as<float>(p);
        else if (dtype == DTYPE_E4M3)
            lanes[i] = f32_from_e4m3(load_as<u8>(p));
        else if (dtype == DTYPE_E5M2)
            lanes[i] = f32_from_e5m2(load_as<u8>(p));
        else
            lanes[i] = load_as<double>(p);
    }
    return lanes;
}

// The reverse: writes lanes to a row of `size` elements, as far as the row goes.
INLINE void store_lanes(char* row, i64 dtype, i64 offset, i64 size, vf lanes) {
    if (offset + W <= size) {
        if (dtype == DTYPE_BF16)
            store_as(row + offset * 2, bf16_from_f32(CONVERT(lanes, v_f32)));
        else if (dtype == DTYPE_F16)
            store_as(row + offset * 2, f16_from_f32(CONVERT(lanes, v_f32)));
        else if (dtype == DTYPE_F32)
            store_as(row + offset * 4, CONVERT(lanes, v_f32));
        else
            store_as(row + offset * 8, CONVERT(lanes, v_f64));
        return;
    }
    for (i64 i = 0; i < W && offset + i < size; i++) {
        char* p = row + (offset + i) * element_bytes(dtype);
        if (dtype == DTYPE_BF16)
            store_as(p, bf16_from_f32((float)lanes[i]));
        else if (dtype == DTYPE_F16)
            store_as(p, f16_from_f32((float)lanes[i]));
        else if (dtype == DTYPE_F32)
            store_as(p, (float)lanes[i]);
        else
            store_as(p, (double)lanes[i]);
    }
}

// row[0:size] = factor * source
NOINLINE void store_row(char* row, i64 dtype, i64 size, const real* source, real factor) {
    for (i64 d = 0; d < size; d += W)
        store_lanes(row, dtype, d, size, vf_load(source + d) * factor);
}

// W units from unit `offset` of a row of `size` elements, as raw lanes.
INLINE vf load_units(const char* row, i64 dtype, i64 offset, i64 size) {
#if BF16_PAIRS
    (void)dtype;
    if ((offset + W) * 2 <= size) return load_as<vf>(row + offset * 4);
    u16 elements[2 * W] = {};
    for (i64 i = 0; i < 2 * W && offset * 2 + i < size; i++)
        elements[i] = load_as<u16>(row + (offset * 2 + i) * 2);
    return load_as<vf>(elements);
#else
    return load_lanes(row, dtype, offset, size);
#endif
}

// How many rows ahead memory is asked for where keys and values are read as they lie, a cache line
// at a time, in step with the products; a burst of requests a tile ahead would be dropped. Saves
// 40% of the time (134 MB of float keys and values).
static const i64 AHEAD = 32;

struct Rows {
    const char* data;
    i64 bytes_between;
    i64 dtype, size;  // elements of a row
    i64 count;        // rows that exist
    i64 ahead = 0;    // bytes to what is read some rows later

    Rows(const Operand& t, i64 b, i64 h, i64 first, i64 num_rows, i64 num_elements)
        : data(row_at(t, b, h, first)),
          bytes_between(t.stride_row * element_bytes(t.dtype)),
          dtype(t.dtype),
          size(num_elements),
          count(num_rows) {}
    Rows(const Operand& t, const char* first, i64 num_rows, i64 num_elements)
        : data(first),
          bytes_between(t.stride_row * element_bytes(t.dtype)),
          dtype(t.dtype),
          size(num_elements),
          count(num_rows) {}
    const char* operator[](i64 row) const { return data + row * bytes_between; }
};

// Rows begin .. end of packed [][row_units], row_units a multiple of W
NOINLINE void pack_units(const Rows& rows, i64 begin, i64 end, i64 row_units, real* packed) {
    for (i64 i = begin; i < end; i++)
        for (i64 d = 0; d < row_units; d += W)
            vf_store(packed + i * row_units + d,
                     i < rows.count ? load_units(rows[i], rows.dtype, d, rows.size) : (vf){});
}

#if BF16_PAIRS
// W elements from `offset` of a row of `size`, zero beyond its end, in the low half of each lane.
INLINE v_u32 load_wide_bf16(const char* row, i64 offset, i64 size) {
    if (offset + W <= size) return CONVERT(load_as<v_u16>(row + offset * 2), v_u32);
    v_u32 lanes = {};
    for (i64 i = 0; i < W && offset + i < size; i++)
        lanes[i] = load_as<u16>(row + (offset + i) * 2);
    return lanes;
}

// Rows begin .. end, both even, of a right operand of `depth` units and row_lanes lanes, a multiple
// of W
NOINLINE void pack_right(const Rows& rows, i64 begin, i64 end, i64 depth, i64 row_lanes,
                         real* packed) {
    for (i64 i = begin; i < end; i += 2) {
        const char *even = rows[i], *odd = rows[i + 1];
        for (i64 d = 0; d < row_lanes; d += W) {
            v_u32 low = {}, high = {};
            if (i < rows.count) low = load_wide_bf16(even, d, rows.size);
            if (i + 1 < rows.count) high = load_wide_bf16(odd, d, rows.size);
            store_as(packed + Packed::offset(depth, row_lanes, i / 2, d), low | high << 16);
        }
    }
}
#else
// Rows begin .. end of a right operand of row_lanes lanes, a multiple of W
NOINLINE void pack_right(const Rows& rows, i64 begin, i64 end, i64, i64 row_lanes, real* packed) {
    pack_units(rows, begin, end, row_lanes, packed);
}
#endif

#if MATRIX_TILES
// A right operand of `units` units and `lanes` lanes, of which num_units are taken, as a left one:
// columns [lanes][units].
INLINE void transpose_packed(i64 num_units, i64 units, i64 lanes, const real* packed,
                             real* columns) {
    for (i64 n = 0; n < lanes; n += STRIP)
        transpose(num_units, min_i64(STRIP, lanes - n), packed + n * units, STRIP,
                  columns + n * units, units);
}
#endif

static const i64 OWN_DTYPE = BF16_PAIRS ? DTYPE_BF16 : REAL_IS_DOUBLE ? DTYPE_F64 : DTYPE_F32;

// W units from `unit` of rows first .. first + W; zero outside.
INLINE void load_block(const Rows& rows, i64 first, i64 unit, vf* lanes) {
    bool inside = first + W <= rows.count && (unit + W) * UNIT_ELEMENTS <= rows.size;
    if (inside && rows.dtype == OWN_DTYPE) {
        const char* corner = rows[first] + unit * (i64)sizeof(real);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) lanes[i] = load_as<vf>(corner + i * rows.bytes_between);
        return;
    }
    for (i64 i = 0; i < W; i++)
        lanes[i] = first + i < rows.count ? load_units(rows[first + i], rows.dtype, unit, rows.size)
                                          : (vf){};
}

// Columns first .. first + W of `packed` [ceil(size / UNIT_ELEMENTS)][TILE_N]; zero from
// rows.count on.
NOINLINE void pack_columns(const Rows& rows, i64 first, real* packed) {
    i64 num_units = round_up(ceil_div(rows.size, UNIT_ELEMENTS), DEPTH_STEP);
    for (i64 unit = 0; unit < num_units; unit += W) {
        vf lanes[W];
        load_block(rows, first, unit, lanes);
        transpose_block(lanes);
        i64 wanted = min_i64(W, num_units - unit);
        for (i64 i = 0; i < wanted; i++)
            vf_store(packed + Packed::offset(num_units, TILE_N, unit + i, first), lanes[i]);
    }
}

// Columns begin .. end, whole vectors.
NOINLINE void pack_transposed(const Rows& rows, i64 begin, i64 end, real* packed) {
    for (i64 first = begin; first < end; first += W) pack_columns(rows, first, packed);
}

#endif
