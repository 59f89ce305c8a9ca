// Reading captured tensors, and adding to their gradients, from the generated fragments.
//
//   T        storage type: bool8, u8, i8, i16, i32, i64, f16, bf16, float or double
//   Line     an index that runs along the lanes: base + step * lane
//   An index is an i64 (equal in every lane), a vi, or a Line. A negative one counts from the end,
//   one that is still outside is clamped, and a tensor without elements reads as zero, so that no
//   lane ever touches memory outside the tensor. Offsets are 64-bit unless they provably fit 32.

#ifndef ATTNLOOM_CAPTURE_H
#define ATTNLOOM_CAPTURE_H

struct bool8 { u8 bits; };
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct Line { i64 base, step; };

// Integers of 29 bits and less are what the bounds of narrow lanes allow for.
INLINE i64 checked(i64 x) {
    if (ILANE_BYTES == 4 && (u64)(x + (1 << 29)) >> 30) narrow_overflow() = 1;
    return x;
}
template <class V> INLINE vi checked_lanes(V x) {
    if constexpr (ILANE_BYTES == 4) {
        const auto outside = (x >= splat<V>(1 << 29)) | (x < splat<V>(-(1 << 29)));
        if (bytes_any(CONVERT(outside, v_i8))) narrow_overflow() = 1;
    }
    return CONVERT(x, vi);
}

template <class T> struct Stored;
#define DEFINE_STORED(T, SCALAR, LANES, ONE, ALL)                       \
    template <> struct Stored<T> {                                      \
        typedef SCALAR scalar;                                          \
        typedef LANES lanes;                                            \
        static inline SCALAR one(T x) { return ONE; }                   \
        static inline LANES all(const T* p) { return ALL; }             \
    };
DEFINE_STORED(bool8, bool, vm, x.bits != 0, convert_mask<vm>(CONVERT(load_as<v_u8>(p), v_i32) != 0))
DEFINE_STORED(u8, i64, vi, x, CONVERT(load_as<v_u8>(p), vi))
DEFINE_STORED(i8, i64, vi, x, CONVERT(load_as<v_i8>(p), vi))
DEFINE_STORED(i16, i64, vi, x, CONVERT(load_as<v_i16>(p), vi))
DEFINE_STORED(i32, i64, vi, checked(x), checked_lanes(load_as<v_i32>(p)))
DEFINE_STORED(i64, i64, vi, checked(x), checked_lanes(load_as<v_i64>(p)))
DEFINE_STORED(f16, float, v_f32, f32_from_f16(x.bits), f32_from_f16(load_as<v_u16>(p)))
DEFINE_STORED(bf16, float, v_f32, f32_from_bf16(x.bits), f32_from_bf16(load_as<v_u16>(p)))
DEFINE_STORED(float, float, v_f32, x, load_as<v_f32>(p))
DEFINE_STORED(double, double, v_f64, x, load_as<v_f64>(p))
#undef DEFINE_STORED

template <class V> INLINE V broadcast(bool x) { return (V)vm_set(x); }
template <class V> INLINE V broadcast(i64 x) { return splat<V>(x); }
template <class V> INLINE V broadcast(float x) { return splat<V>(x); }
template <class V> INLINE V broadcast(double x) { return splat<V>(x); }

INLINE i64 clamp_index(i64 i, i64 size) {
    i = i < 0 ? i + size : i;
    i = i < 0 ? 0 : i;
    return i < size ? i : size - 1;
}
template <class V> INLINE V clamp_index(V i, i64 size) {
    const V n = splat<V>(size), last = splat<V>(size - 1);
    i = select(i < V{}, i + n, i);
    i = select(i < V{}, V{}, i);
    return select(i < last, i, last);
}
template <int RANK> INLINE bool has_elements(const i64* size) {
    for (int d = 0; d < RANK; d++)
        if (size[d] <= 0) return false;
    return true;
}
// Whether 32 bits hold every size and every offset, so that gathers may compute in 32-bit lanes.
template <int RANK> INLINE bool offsets_fit(const TensorArg& t) {
    i64 reach = 0;
    bool fit = true;
    for (int d = 0; d < RANK; d++) {
        fit &= t.size[d] < (1ll << 30) && t.stride[d] < (1ll << 31) && t.stride[d] > -(1ll << 31);
        reach += fit ? t.size[d] * (t.stride[d] < 0 ? -t.stride[d] : t.stride[d]) : 0;
    }
    return fit && reach < (1ll << 31);
}

// ---- loads ----------------------------------------------------------------------------------

// One element, the same for every lane.
template <class T, class... I>
INLINE typename Stored<T>::scalar load_one(const TensorArg& t, I... index) {
    constexpr int rank = sizeof...(I);
    const i64 at[rank + 1] = {index..., 0};
    if (!has_elements<rank>(t.size)) return 0;
    i64 offset = 0;
    for (int d = 0; d < rank; d++) offset += clamp_index(at[d], t.size[d]) * t.stride[d];
    return Stored<T>::one(((const T*)t.data)[offset]);
}

template <class V> INLINE V lanes_of(i64 i) { return splat<V>(i); }
template <class V> INLINE V lanes_of(vi i) { return CONVERT(i, V); }
template <class V> INLINE V lanes_of(Line i) {
    return splat<V>(i.base) + lane_index<V>() * splat<V>(i.step);
}
// Offset that one dimension contributes, for every lane.
template <class V> INLINE V lane_offsets(i64 i, i64 size, i64 stride) {
    return splat<V>(clamp_index(i, size) * stride);
}
template <class V, class I> INLINE V lane_offsets(I i, i64 size, i64 stride) {
    return clamp_index(lanes_of<V>(i), size) * splat<V>(stride);
}
template <class V, class... I>
INLINE V lane_offsets_of(const i64* size, const i64* stride, I... index) {
    V offsets = {};
    int d = 0;
    ((offsets += lane_offsets<V>(index, size[d], stride[d]), d++), ...);
    return offsets;
}
// Clamped distances and buckets give whole vectors of one offset.
template <class V> INLINE bool all_equal(V offsets) {
    return !bytes_any(CONVERT(offsets != splat<V>(offsets[0]), v_i8));
}
template <class T, class V>
INLINE typename Stored<T>::lanes load_at(const void* data, V offsets) {
    const T* elements = (const T*)data;
    typedef typename Stored<T>::lanes Lanes;
    if (all_equal(offsets)) return broadcast<Lanes>(Stored<T>::one(elements[offsets[0]]));
    alignas(64) T lanes[W];
    alignas(64) typename LaneOf<V>::scalar at[W];
    store_as(at, offsets);
    for (int l = 0; l < W; l++) lanes[l] = elements[at[l]];
    return Stored<T>::all(lanes);
}
template <class T, class... I>
INLINE typename Stored<T>::lanes load_lanes(const TensorArg& t, I... index) {
    constexpr int rank = sizeof...(I);
    if (!has_elements<rank>(t.size)) return typename Stored<T>::lanes{};
#if ILANE_BYTES == 4
    if (offsets_fit<rank>(t))
        return load_at<T>(t.data, lane_offsets_of<v_i32>(t.size, t.stride, index...));
#endif
    return load_at<T>(t.data, lane_offsets_of<v_i64>(t.size, t.stride, index...));
}

INLINE bool inside(Line i, i64 size) {
    return (u64)i.base < (u64)size && (u64)(i.base + i.step * (W - 1)) < (u64)size;
}
template <class T, class... I>
NOINLINE typename Stored<T>::lanes load_line_at_edge(const TensorArg& t, I... index) {
    return load_lanes<T>(t, index...);
}
// Every index a Line. Where the whole vector lies inside and its elements are neighbours, in either
// direction, this is one vector load.
template <class T, class... I>
INLINE typename Stored<T>::lanes load_line(const TensorArg& t, I... index) {
    i64 offset = 0, step = 0;
    bool whole = true;
    int d = 0;
    ((whole &= inside(index, t.size[d]), offset += index.base * t.stride[d],
      step += index.step * t.stride[d], d++),
     ...);
    if (!whole) return load_line_at_edge<T>(t, index...);
    const T* p = (const T*)t.data + offset;
    if (step == 1) return Stored<T>::all(p);
    alignas(64) T lanes[W];
    if (step == -1)
        for (int l = 0; l < W; l++) lanes[l] = p[-l];
    else
        for (int l = 0; l < W; l++) lanes[l] = p[l * step];
    return Stored<T>::all(lanes);
}

// ---- gradients ------------------------------------------------------------------------------

template <int RANK> struct Contiguous {
    i64 stride[RANK + 1], num_elements;
};
template <int RANK> INLINE Contiguous<RANK> contiguous(const TensorArg& t) {
    Contiguous<RANK> s;
    i64 stride = 1;
    for (int d = RANK - 1; d >= 0; d--) {
        s.stride[d] = stride;
        stride *= t.size[d];
    }
    s.num_elements = stride;
    return s;
}
template <class... I>
INLINE void add_one(const ModArgs& M, int slot, real value, I... index) {
    constexpr int rank = sizeof...(I);
    const TensorArg& t = M.tensors[slot];
    real* grad = M.grads[slot];
    if (!grad || !has_elements<rank>(t.size)) return;
    const i64 at[rank + 1] = {index..., 0};
    const Contiguous<rank> s = contiguous<rank>(t);
    i64 offset = 0;
    for (int d = 0; d < rank; d++) offset += clamp_index(at[d], t.size[d]) * s.stride[d];
    grad[offset] += value;
}
// Adds to grad[offsets[lane]]. Lanes that are not live hold zero, and their offset is inside too.
template <class V> INLINE void add_at(real* grad, V offsets, vf value) {
    if (all_equal(offsets)) {  // else W additions would wait for one another
        grad[offsets[0]] += vf_hsum(value);
        return;
    }
    alignas(64) real values[W];
    alignas(64) typename LaneOf<V>::scalar at[W];
    store_as(values, value);
    store_as(at, offsets);
    for (int l = 0; l < W; l++) grad[at[l]] += values[l];
}
template <class... I>
NOINLINE void add_lanes(const ModArgs& M, int slot, vf value, I... index) {
    constexpr int rank = sizeof...(I);
    const TensorArg& t = M.tensors[slot];
    real* grad = M.grads[slot];
    if (!grad || !has_elements<rank>(t.size)) return;
    const Contiguous<rank> s = contiguous<rank>(t);
#if ILANE_BYTES == 4
    if (s.num_elements < (1ll << 31)) {
        add_at(grad, lane_offsets_of<v_i32>(t.size, s.stride, index...), value);
        return;
    }
#endif
    add_at(grad, lane_offsets_of<v_i64>(t.size, s.stride, index...), value);
}
INLINE vf reversed(vf v) {
#if W == 16
    return VF_SHUFFLE(v, v, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#elif W == 8
    return VF_SHUFFLE(v, v, 7, 6, 5, 4, 3, 2, 1, 0);
#elif W == 4
    return VF_SHUFFLE(v, v, 3, 2, 1, 0);
#else
    return VF_SHUFFLE(v, v, 1, 0);
#endif
}
// Every index a Line; neighbouring elements inside the tensor take one vector addition.
template <class... I>
INLINE void add_line(const ModArgs& M, int slot, vf value, I... index) {
    constexpr int rank = sizeof...(I);
    const TensorArg& t = M.tensors[slot];
    real* grad = M.grads[slot];
    if (!grad) return;
    const Contiguous<rank> s = contiguous<rank>(t);
    i64 offset = 0, step = 0;
    bool whole = true;
    int d = 0;
    ((whole &= inside(index, t.size[d]), offset += index.base * s.stride[d],
      step += index.step * s.stride[d], d++),
     ...);
    if (!whole || (step != 1 && step != -1)) {
        add_lanes(M, slot, value, index...);
        return;
    }
    real* first = step == 1 ? grad + offset : grad + offset - (W - 1);
    vf_store(first, vf_load(first) + (step == 1 ? value : reversed(value)));
}

#endif
