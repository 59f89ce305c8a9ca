// Lane-wise operations of the generated fragments that are exact: comparison, selection, conversion,
// rounding and integer arithmetic. vecmath.h adds the transcendental ones, capture.h the loads.
//
//   v_NAME    operation NAME of the IR. Vectors: v_f32, v_f64, vi, vm. Scalars: float, double and,
//             for every integer type of the IR, i64; they overload the same names.
//   lanes of an integer type narrower than ilane are kept wrapped to it by wrap_*.

#ifndef ATTNLOOM_LANES_H
#define ATTNLOOM_LANES_H

// ---- masks, selection, conversion -----------------------------------------------------------

template <class V> struct LaneOf;
template <> struct LaneOf<v_f32> { typedef float scalar; typedef v_i32 ints; };
template <> struct LaneOf<v_f64> { typedef double scalar; typedef v_i64 ints; };
template <> struct LaneOf<v_i32> { typedef int scalar; typedef v_i32 ints; };
template <> struct LaneOf<v_i64> { typedef i64 scalar; typedef v_i64 ints; };

template <class To, class From> INLINE To convert_mask(From m) {
    if constexpr (sizeof(To) == sizeof(From)) return (To)m;
    else return CONVERT(m, To);
}
template <class V, class S> INLINE V splat(S x) { return (typename LaneOf<V>::scalar)x - V{}; }
template <class V, class M> INLINE V select(M m, V a, V b) {
    return convert_mask<typename LaneOf<V>::ints>(m) ? a : b;
}
// Scalar conditions; `&` of two is an int.
template <class V> INLINE V select(bool m, V a, V b) { return m ? a : b; }
template <class V> INLINE V select(int m, V a, V b) { return m ? a : b; }
template <class V> INLINE V lane_index() { return CONVERT(vi_iota(), V); }

template <class V> INLINE vm v_eq(V a, V b) { return convert_mask<vm>(a == b); }
template <class V> INLINE vm v_ne(V a, V b) { return convert_mask<vm>(a != b); }
template <class V> INLINE vm v_lt(V a, V b) { return convert_mask<vm>(a < b); }
template <class V> INLINE vm v_le(V a, V b) { return convert_mask<vm>(a <= b); }
template <class V> INLINE vm v_gt(V a, V b) { return convert_mask<vm>(a > b); }
template <class V> INLINE vm v_ge(V a, V b) { return convert_mask<vm>(a >= b); }

template <class V> INLINE vi mask_to_int(V m) { return -convert_mask<vi>(m); }
template <class V> INLINE V mask_to_float(vm m) { return select(m, splat<V>(1), V{}); }

// A float beyond what an integer lane holds is reported; infinities and NaN, which have no integer
// value anywhere, merely saturate, since masked-off lanes often hold them (log(0), say).
template <class V> INLINE vi float_to_int(V x) {
    if constexpr (sizeof(ilane) == 4) {
        const V bound = splat<V>(1 << 29), inf = splat<V>(__builtin_inf());
        const V size = select(x < V{}, -x, x);
        if (vm_any(v_ge(size, bound) & v_lt(size, inf))) narrow_overflow() = 1;
        x = select(x == x, x, -bound);
        x = select(x < bound, x, bound);
        x = select(x > -bound, x, -bound);
    }
    return CONVERT(x, vi);
}
INLINE i64 to_i64(double x) {
    const double bound = 9223372036854774784.0;  // the last double below 2^63
    return x >= -bound && x <= bound ? (i64)x : (i64)(~0ull << 63);
}

// ---- bits and rounding ----------------------------------------------------------------------

template <class V> INLINE typename LaneOf<V>::ints sign_bits() {
    return splat<typename LaneOf<V>::ints>((i64)(1ull << (8 * sizeof(V) / W - 1)));
}
template <class V> INLINE typename LaneOf<V>::ints bits_of(V x) {
    return (typename LaneOf<V>::ints)x;
}
template <class V> INLINE V v_fabs(V x) { return (V)(bits_of(x) & ~sign_bits<V>()); }
template <class V> INLINE V v_copysign(V x, V s) {
    return (V)((bits_of(x) & ~sign_bits<V>()) | (bits_of(s) & sign_bits<V>()));
}
// Adding and subtracting 2^23 (2^52) rounds half to even below that size; above, x is whole.
template <class V> INLINE V v_round(V x) {
    const V whole = splat<V>(sizeof(V) == 4 * W ? 8388608.0 : 4503599627370496.0);
    const V size = v_fabs(x), rounded = (size + whole) - whole;
    return v_copysign(select(size < whole, rounded, size), x);
}
template <class V> INLINE V v_floor(V x) {
    const V r = v_round(x);
    return v_copysign(r - select(r > x, splat<V>(1), V{}), x);
}
template <class V> INLINE V v_ceil(V x) { return -v_floor(-x); }
template <class V> INLINE V v_trunc(V x) { return v_copysign(v_floor(v_fabs(x)), x); }
template <class V> INLINE V v_fmin(V a, V b) { return select((a < b) | (a != a), a, b); }
template <class V> INLINE V v_fmax(V a, V b) { return select((a > b) | (a != a), a, b); }
template <class V> INLINE V v_sign(V x) {
    return select(x > V{}, splat<V>(1), select(x < V{}, splat<V>(-1), V{}));
}
template <class V> INLINE vm v_isnan(V x) { return v_ne(x, x); }
template <class V> INLINE vm v_isinf(V x) { return v_eq(v_fabs(x), splat<V>(__builtin_inf())); }
template <class V> INLINE vm v_isfinite(V x) { return v_lt(v_fabs(x), splat<V>(__builtin_inf())); }
template <class V> INLINE V v_reciprocal(V x) { return splat<V>(1) / x; }

// ---- integers -------------------------------------------------------------------------------

#define ILANE_MAX ((ilane)(~0ull >> (65 - 8 * ILANE_BYTES)))
#define ILANE_MIN (-ILANE_MAX - 1)

template <int BITS, class V> INLINE V wrap_signed(V x) {
    constexpr int spare = (int)(8 * sizeof(x[0])) - BITS;
    if constexpr (spare <= 0) return x;
    else return (x << spare) >> spare;
}
template <int BITS> INLINE i64 wrap_signed(i64 x) {
    return (i64)((u64)x << (64 - BITS)) >> (64 - BITS);
}
template <int BITS, class V> INLINE V wrap_unsigned(V x) { return x & ((1 << BITS) - 1); }

template <class V> INLINE V v_iabs(V x) { return select(x < V{}, -x, x); }
template <class V> INLINE V v_imin(V a, V b) { return select(a < b, a, b); }
template <class V> INLINE V v_imax(V a, V b) { return select(a > b, a, b); }
INLINE i64 v_iabs(i64 x) { return x < 0 ? (i64)(0 - (u64)x) : x; }
INLINE i64 v_imin(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 v_imax(i64 a, i64 b) { return a > b ? a : b; }

// a / b towards zero, b != 0. There is no vector instruction; a double holds every 32-bit quotient
// closely enough: a / b is either whole or at least 1 / |b| > |a / b| * 2^-32 away from whole.
INLINE v_i32 quotient(v_i32 a, v_i32 b) {
    return CONVERT(CONVERT(a, v_f64) / CONVERT(b, v_f64), v_i32);
}
INLINE i64 quotient(i64 a, i64 b) { return b == -1 ? (i64)(0 - (u64)a) : a / b; }
NOINLINE v_i64 quotient(v_i64 a, v_i64 b) {
    for (int l = 0; l < W; l++) a[l] = quotient((i64)a[l], (i64)b[l]);
    return a;
}
INLINE i64 zero_of(i64) { return 0; }
template <class V> INLINE V zero_of(V) { return V{}; }
INLINE i64 ones_of(i64) { return 1; }
template <class V> INLINE V ones_of(V) { return splat<V>(1); }

// Dividing by zero gives 0, as does the remainder.
template <class V> INLINE V v_truncdiv(V a, V b) {
    const auto valid = b != zero_of(b);
    return select(valid, quotient(a, select(valid, b, ones_of(b))), zero_of(b));
}
template <class V> INLINE V v_ifmod(V a, V b) {
    const auto valid = b != zero_of(b);
    const V q = quotient(a, select(valid, b, ones_of(b)));
    return select(valid, a - q * b, zero_of(b));
}
template <class V> INLINE V v_imod(V a, V b) {
    const V r = v_ifmod(a, b), zero = zero_of(b);
    return select((r != zero) & ((r ^ b) < zero), r + b, r);
}
template <class V> INLINE V v_ifloordiv(V a, V b) {
    const V q = v_truncdiv(a, b), r = a - q * b, zero = zero_of(b);
    return select((b != zero) & (r != zero) & ((r ^ b) < zero), q - ones_of(b), q);
}

INLINE i64 integer_power(i64 a, i64 n) {
    if (n < 0) return a == 1 ? 1 : a == -1 ? (n & 1 ? -1 : 1) : 0;
    u64 result = 1;
    for (u64 power = (u64)a; n; n >>= 1, power *= power)
        if (n & 1) result *= power;
    return (i64)result;
}
template <int BITS> INLINE i64 v_ipow(i64 a, i64 n) { return integer_power(a, n); }
template <int BITS, class V> NOINLINE V v_ipow(V a, V n) {
    for (int l = 0; l < W; l++) {
        const i64 power = integer_power(a[l], n[l]);
        if (BITS == 64 && power != (ilane)power) narrow_overflow() = 1;
        a[l] = (ilane)power;
    }
    return a;
}

// Shifts whose count is outside the BITS of the type move every bit out.
template <int BITS> INLINE i64 v_shl(i64 a, i64 n) {
    return n < 0 || n >= BITS ? 0 : (i64)((u64)a << n);
}
template <int BITS> INLINE i64 v_shr(i64 a, i64 n) { return a >> (n < 0 || n >= BITS ? 63 : n); }
template <int BITS, class V> INLINE V v_shl(V a, V n) {
    constexpr int bits = BITS < (int)(8 * sizeof(a[0])) ? BITS : (int)(8 * sizeof(a[0]));
    const auto inside = (n >= V{}) & (n < splat<V>(bits));
    return select(inside, a << select(inside, n, V{}), V{});
}
template <int BITS, class V> INLINE V v_shr(V a, V n) {
    constexpr int last = (int)(8 * sizeof(a[0])) - 1;
    constexpr int bits = BITS <= last ? BITS : last;
    const auto inside = (n >= V{}) & (n < splat<V>(bits));
    return a >> select(inside, n, splat<V>(last));
}

// ---- scalars --------------------------------------------------------------------------------

#define DEFINE_SCALAR_ROUNDING(S, SUFFIX)                                        \
    INLINE S v_floor(S x) { return __builtin_floor##SUFFIX(x); }                 \
    INLINE S v_ceil(S x) { return __builtin_ceil##SUFFIX(x); }                   \
    INLINE S v_trunc(S x) { return __builtin_trunc##SUFFIX(x); }                 \
    INLINE S v_round(S x) { return __builtin_rint##SUFFIX(x); }                  \
    INLINE S v_fabs(S x) { return __builtin_fabs##SUFFIX(x); }                   \
    INLINE S v_copysign(S x, S s) { return __builtin_copysign##SUFFIX(x, s); }   \
    INLINE S v_fmin(S a, S b) { return a < b || a != a ? a : b; }                \
    INLINE S v_fmax(S a, S b) { return a > b || a != a ? a : b; }                \
    INLINE S v_sign(S x) { return (S)((x > 0) - (x < 0)); }                      \
    INLINE S v_reciprocal(S x) { return 1 / x; }                                 \
    INLINE bool v_isnan(S x) { return x != x; }                                  \
    INLINE bool v_isinf(S x) { return __builtin_fabs##SUFFIX(x) == __builtin_inf(); } \
    INLINE bool v_isfinite(S x) { return __builtin_fabs##SUFFIX(x) < __builtin_inf(); }
DEFINE_SCALAR_ROUNDING(float, f)
DEFINE_SCALAR_ROUNDING(double, )
INLINE i64 v_sign(i64 x) { return (x > 0) - (x < 0); }

#endif
