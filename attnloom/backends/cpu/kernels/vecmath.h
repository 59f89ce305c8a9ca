// Vector arithmetic of the generated fragments: every floating-point operation of the IR, lane by
// lane, in float and in double. Needs lanes.h.
//
//   v_NAME         operation NAME of the IR on v_f32, v_f64, or one float or double
//   v_NAME_exact   the variant that `exact_math` asks for, where v_NAME alone is approximate
//
// Errors against the true value, float: at most 2 units in the last place for exp, exp2, expm1,
// log, log2, log1p, tanh_exact and erf, 6 for tanh in bfloat16 builds (one division), 1e-7 absolute for
// sin, cos and sigmoid. Double: at most 2 units, 5 for tanh. What is rare calls libm once a lane.
// Polynomials are near-minimax (Chebyshev) fits on the intervals named.

#ifndef ATTNLOOM_VECMATH_H
#define ATTNLOOM_VECMATH_H

// ---- libm, once a lane ----------------------------------------------------------------------

template <class S> INLINE S python_mod(S a, S b) {
    const S r = (S)__builtin_fmod(a, b);
    return r != 0 && (b < 0) != (r < 0) ? r + b : r;
}
template <class S> INLINE S python_floordiv(S a, S b) {
    if (b == 0) return a / b;
    const S r = (S)__builtin_fmod(a, b);
    S q = (a - r) / b;
    if (r != 0 && (b < 0) != (r < 0)) q -= 1;
    if (q == 0) return v_copysign((S)0, a / b);
    const S whole = v_floor(q);
    return q - whole > (S)0.5 ? whole + 1 : whole;
}
#define LANES_1(NAME, CALL32, CALL64) \
    INLINE float NAME(float x) { return CALL32; } \
    INLINE double NAME(double x) { return CALL64; } \
    LANES_1_OF(v_f32, float, NAME) LANES_1_OF(v_f64, double, NAME)
#define LANES_1_OF(V, S, NAME) \
    NOINLINE V NAME(V v) { \
        S a[W]; \
        __builtin_memcpy(a, &v, sizeof v); \
        for (int l = 0; l < W; l++) a[l] = NAME(a[l]); \
        __builtin_memcpy(&v, a, sizeof v); \
        return v; \
    }
#define LANES_2(NAME, CALL32, CALL64) \
    INLINE float NAME(float x, float y) { return CALL32; } \
    INLINE double NAME(double x, double y) { return CALL64; } \
    LANES_2_OF(v_f32, float, NAME) LANES_2_OF(v_f64, double, NAME)
#define LANES_2_OF(V, S, NAME) \
    NOINLINE V NAME(V v, V w) { \
        S a[W], b[W]; \
        __builtin_memcpy(a, &v, sizeof v); \
        __builtin_memcpy(b, &w, sizeof w); \
        for (int l = 0; l < W; l++) a[l] = NAME(a[l], b[l]); \
        __builtin_memcpy(&v, a, sizeof v); \
        return v; \
    }
LANES_1(v_tan, __builtin_tanf(x), __builtin_tan(x))
LANES_1(v_asin, __builtin_asinf(x), __builtin_asin(x))
LANES_1(v_acos, __builtin_acosf(x), __builtin_acos(x))
LANES_1(v_atan, __builtin_atanf(x), __builtin_atan(x))
LANES_1(v_sinh, __builtin_sinhf(x), __builtin_sinh(x))
LANES_1(v_cosh, __builtin_coshf(x), __builtin_cosh(x))
LANES_1(v_asinh, __builtin_asinhf(x), __builtin_asinh(x))
LANES_1(v_acosh, __builtin_acoshf(x), __builtin_acosh(x))
LANES_1(v_atanh, __builtin_atanhf(x), __builtin_atanh(x))
LANES_1(v_erfc, __builtin_erfcf(x), __builtin_erfc(x))
LANES_1(libm_sin, __builtin_sinf(x), __builtin_sin(x))
LANES_1(libm_cos, __builtin_cosf(x), __builtin_cos(x))
LANES_1(libm_tanh, __builtin_tanhf(x), __builtin_tanh(x))
LANES_1(libm_erf, __builtin_erff(x), __builtin_erf(x))
LANES_2(v_atan2, __builtin_atan2f(x, y), __builtin_atan2(x, y))
LANES_2(v_pow, __builtin_powf(x, y), __builtin_pow(x, y))
LANES_2(v_fmod, __builtin_fmodf(x, y), __builtin_fmod(x, y))

// Python's float division and remainder, as torch has them: the remainder has the divisor's sign.
LANES_2(v_mod, python_mod(x, y), python_mod(x, y))
LANES_2(v_floordiv, python_floordiv(x, y), python_floordiv(x, y))

// Not rare, and one instruction a vector: the loop over an array is what compilers recognise.
template <class V> INLINE V v_sqrt(V v) {
    typename LaneOf<V>::scalar a[W];
    __builtin_memcpy(a, &v, sizeof v);
    for (int l = 0; l < W; l++)
        a[l] = sizeof(a[0]) == 4 ? __builtin_sqrtf((float)a[l]) : __builtin_sqrt((double)a[l]);
    __builtin_memcpy(&v, a, sizeof v);
    return v;
}
template <class V> INLINE V v_rsqrt(V x) { return splat<V>(1) / v_sqrt(x); }

// ---- exponentials ---------------------------------------------------------------------------

// p * 2^n for whole n; in two factors, so that neither overflows before the product does.
INLINE v_f32 scale_exponent(v_f32 p, v_i32 n) {
    const v_i32 half = n >> 1;
    return p * (v_f32)((half + 127) << 23) * (v_f32)((n - half + 127) << 23);
}
INLINE v_f64 scale_exponent(v_f64 p, v_i64 n) {
    const v_i64 half = n >> 1;
    return p * (v_f64)((half + 1023) << 52) * (v_f64)((n - half + 1023) << 52);
}
template <class V> INLINE V clamp_keeping_nan(V x, double low, double high) {
    x = select(x < splat<V>(low), splat<V>(low), x);
    return select(x > splat<V>(high), splat<V>(high), x);
}
// n = the whole number nearest t, |t| < 2^22 (2^51), as an integer and as a float
INLINE v_i32 nearest(v_f32 t, v_f32& n) {
    const v_f32 shifted = t + 12582912.0f;
    n = shifted - 12582912.0f;
    return (v_i32)shifted - 0x4b400000;
}
INLINE v_i64 nearest(v_f64 t, v_f64& n) {
    const v_f64 shifted = t + 6755399441055744.0;
    n = shifted - 6755399441055744.0;
    return (v_i64)shifted - 0x4338000000000000ll;
}
// (e^r - 1 - r) / r^2
INLINE v_f32 exp_tail(v_f32 r) {  // |r| <= ln(2)/2
    v_f32 p = splat<v_f32>(1.392621384e-3f);
    p = p * r + 8.363202972e-3f;
    p = p * r + 4.166655443e-2f;
    p = p * r + 0.1666657685f;
    return p * r + 0.5f;
}
INLINE v_f64 exp_tail(v_f64 r) {
    v_f64 p = splat<v_f64>(2.091471734109888522e-9);
    p = p * r + 2.510525953844849341e-8;
    p = p * r + 2.755727357010418136e-7;
    p = p * r + 2.755725529796964439e-6;
    p = p * r + 2.480158732560532033e-5;
    p = p * r + 1.984126987490125923e-4;
    p = p * r + 1.388888888888373183e-3;
    p = p * r + 8.333333333326112053e-3;
    p = p * r + 4.166666666666666977e-2;
    p = p * r + 0.1666666666666667101;
    return p * r + 0.5;
}
INLINE v_f32 v_exp(v_f32 x) {
    x = clamp_keeping_nan(x, -104.5, 89.5);
    v_f32 n;
    const v_i32 e = nearest(x * 1.44269504f, n);
    const v_f32 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    return scale_exponent((exp_tail(r) * r * r + r) + 1.0f, e);
}
INLINE v_f64 v_exp(v_f64 x) {
    x = clamp_keeping_nan(x, -746, 710);
    v_f64 n;
    const v_i64 e = nearest(x * 1.4426950408889634, n);
    const v_f64 r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    return scale_exponent((exp_tail(r) * r * r + r) + 1.0, e);
}
INLINE v_f32 v_exp2(v_f32 x) {
    x = clamp_keeping_nan(x, -151, 129);
    v_f32 n;
    const v_i32 e = nearest(x, n);
    const v_f32 r = x - n;
    v_f32 p = splat<v_f32>(1.545316295e-4f);
    p = p * r + 1.339086336e-3f;
    p = p * r + 9.618082557e-3f;
    p = p * r + 5.550357114e-2f;
    p = p * r + 0.2402265076f;
    p = p * r + 0.693147188f;
    return scale_exponent(p * r + 1.0f, e);
}
INLINE v_f64 v_exp2(v_f64 x) {
    x = clamp_keeping_nan(x, -1076, 1025);
    v_f64 n;
    const v_i64 e = nearest(x, n);
    const v_f64 r = x - n;
    v_f64 p = splat<v_f64>(2.572932417736230421e-11);
    p = p * r + 4.455817908336064493e-10;
    p = p * r + 7.054897304155499277e-9;
    p = p * r + 1.01780570877339411e-7;
    p = p * r + 1.321548680870556279e-6;
    p = p * r + 1.525273384155677259e-5;
    p = p * r + 1.540353039337073341e-4;
    p = p * r + 1.33335581464064707e-3;
    p = p * r + 9.618129107628479493e-3;
    p = p * r + 5.550410866482162704e-2;
    p = p * r + 0.2402265069591007123;
    p = p * r + 0.6931471805599453093;
    return scale_exponent(p * r + 1.0, e);
}
INLINE v_f32 expm1_tail(v_f32 x) {  // (e^x - 1 - x) / x^2, |x| <= 0.7
    v_f32 p = splat<v_f32>(2.00788942e-4f) + x * 2.503899105e-5f;
    p = p * x + 1.388830644e-3f;
    p = p * x + 8.332750182e-3f;
    p = p * x + 4.166667024e-2f;
    p = p * x + 0.1666667024f;
    return p * x + 0.5f;
}
INLINE v_f64 expm1_tail(v_f64 x) {
    v_f64 p = splat<v_f64>(1.618126469286873719e-10) + x * 1.154710303747729091e-11;
    p = p * x + 2.087628881182624879e-9;
    p = p * x + 2.505135890630596016e-8;
    p = p * x + 2.755732060110264062e-7;
    p = p * x + 2.755732142867754229e-6;
    p = p * x + 2.480158729961864733e-5;
    p = p * x + 1.984126983811802431e-4;
    p = p * x + 1.388888888889009486e-3;
    p = p * x + 8.333333333335264131e-3;
    p = p * x + 4.166666666666666456e-2;
    p = p * x + 0.1666666666666666329;
    return p * x + 0.5;
}
template <class V> INLINE V v_expm1(V x) {
    const V near = select(v_fabs(x) < splat<V>(0.7), x, V{});
    const V y = near + near * near * expm1_tail(near);
    return select(x == V{}, x, select(v_fabs(x) < splat<V>(0.7), y, v_exp(x) - splat<V>(1)));
}
template <class V> INLINE V v_sigmoid(V x) { return splat<V>(1) / (splat<V>(1) + v_exp(-x)); }

// ---- logarithms -----------------------------------------------------------------------------

// x = 2^e * (1 + f), 1 + f in [sqrt(1/2), sqrt(2)), for positive finite x
INLINE v_f32 split_exponent(v_f32 x, v_f32& e) {
    const auto small = x < splat<v_f32>(1.17549435e-38f);
    x = select(small, x * 8388608.0f, x);
    const v_i32 shifted = (v_i32)x - 0x3f3504f3;
    e = CONVERT(shifted >> 23, v_f32) - select(small, splat<v_f32>(23), v_f32{});
    return (v_f32)((shifted & 0x7fffff) + 0x3f3504f3) - 1.0f;
}
INLINE v_f64 split_exponent(v_f64 x, v_f64& e) {
    const auto small = x < splat<v_f64>(2.2250738585072014e-308);
    x = select(small, x * 4503599627370496.0, x);
    const v_i64 shifted = (v_i64)x - 0x3fe6a09e667f3bcdll;
    e = CONVERT(shifted >> 52, v_f64) - select(small, splat<v_f64>(52), v_f64{});
    return (v_f64)((shifted & 0xfffffffffffffll) + 0x3fe6a09e667f3bcdll) - 1.0;
}
// log(1 + f) - f
INLINE v_f32 log_tail(v_f32 f) {
    v_f32 p = splat<v_f32>(6.980701959e-2f);
    p = p * f - 0.1149454661f;
    p = p * f + 0.1168907114f;
    p = p * f - 0.1242403772f;
    p = p * f + 0.1424855126f;
    p = p * f - 0.1666785097f;
    p = p * f + 0.200007305f;
    p = p * f - 0.2499999663f;
    p = p * f + 0.3333333112f;
    return (p * f - 0.5f) * f * f;
}
INLINE v_f64 log_tail(v_f64 f) {  // by s = f / (2 + f), as in fdlibm
    const v_f64 s = f / (f + 2.0), z = s * s, half = f * f * 0.5;
    v_f64 p = splat<v_f64>(1.479819860511658591e-01);
    p = p * z + 1.531383769920937332e-01;
    p = p * z + 1.818357216161805012e-01;
    p = p * z + 2.222219843214978396e-01;
    p = p * z + 2.857142874366239149e-01;
    p = p * z + 3.999999999940941908e-01;
    p = p * z + 6.666666666666735130e-01;
    return s * (half + p * z) - half;
}
template <class V> INLINE V log_edges(V x, V y) {
    const V inf = splat<V>(__builtin_inf());
    y = select(x == V{}, -inf, y);
    y = select(x == inf, inf, y);
    return select(x >= V{}, y, splat<V>(__builtin_nan("")));
}
template <class V> INLINE V v_log(V x) {
    V e;
    const V f = split_exponent(x, e);
    const V high = splat<V>(0.693359375), low = splat<V>(-2.121944400546905827679e-4);
    return log_edges(x, (log_tail(f) + e * low) + f + e * high);
}
template <class V> INLINE V v_log2(V x) {
    V e;
    const V f = split_exponent(x, e), tail = log_tail(f);
    // log2(e) = 1.4375 + rest: f * 1.4375 loses nothing that matters, the rest is small
    const V rest = splat<V>(1.4426950408889634074 - 1.4375), high = splat<V>(1.4375);
    return log_edges(x, ((tail + f) * rest + tail * high) + f * high + e);
}
template <class V> INLINE V v_log1p(V x) {
    const V one = splat<V>(1), u = x + one, inf = splat<V>(__builtin_inf());
    const V lost = (x - (u - one)) / u;  // what rounding 1 + x dropped, to first order
    const V y = v_log(u) + select((u > V{}) & (u < inf), lost, V{});
    return select(x == V{}, x, y);
}

// ---- tanh, erf, sin, cos --------------------------------------------------------------------

INLINE v_f32 v_tanh_exact(v_f32 x) {
    const v_f32 size = v_fabs(x), z = size * size;
    v_f32 p = splat<v_f32>(1.76287725e-3f);
    p = p * z - 7.734463229e-3f;
    p = p * z + 2.152135517e-2f;
    p = p * z - 5.391799249e-2f;
    p = p * z + 0.1333306266f;
    p = p * z - 0.3333333094f;
    const v_f32 far = 1.0f - 2.0f / (v_exp(size + size) + 1.0f);
    return v_copysign(select(size < splat<v_f32>(0.8f), p * z * size + size, far), x);
}
INLINE v_f64 v_tanh_exact(v_f64 x) {
    const v_f64 size = v_fabs(x), m = v_expm1(size + size);
    return v_copysign(select(size > splat<v_f64>(20), splat<v_f64>(1), m / (m + 2.0)), x);
}
#if BF16_PAIRS
// x P(x^2) / Q(x^2), fitted to a relative error of 4e-7 where tanh is not 1 in float: far below what
// the rounding of probabilities to bfloat16 leaves.
INLINE v_f32 v_tanh(v_f32 x) {
    x = clamp_keeping_nan(x, -9.02, 9.02);
    const v_f32 z = x * x;
    v_f32 p = splat<v_f32>(1.0404574823e-5f), q = splat<v_f32>(2.1397514161e-7f);
    p = p * z + 2.8531628195e-3f;
    p = p * z + 0.1283348054f;
    p = p * z + 0.9999995828f;
    q = q * z + 2.2502194042e-4f;
    q = q * z + 2.3411927745e-2f;
    q = q * z + 0.4616652131f;
    q = q * z + 1.0f;
    return x * p / q;
}
#else
INLINE v_f32 v_tanh(v_f32 x) { return v_tanh_exact(x); }
#endif
INLINE v_f64 v_tanh(v_f64 x) { return v_tanh_exact(x); }

// x P(x^2) below 0.93, 1 - exp(-R(|x|)) above; both fitted to 2e-7 of erf.
INLINE v_f32 v_erf(v_f32 x) {
    const v_f32 t = clamp_keeping_nan(v_fabs(x), 0, 4.1), z = t * t;
    v_f32 far = splat<v_f32>(-1.4215237343e-6f);
    far = far * t + 4.2294534069e-5f;
    far = far * t - 5.6890014093e-4f;
    far = far * t + 4.6448144130e-3f;
    far = far * t - 2.6134662330e-2f;
    far = far * t + 0.1096356735f;
    far = far * t + 0.6322447658f;
    far = far * t + 1.1300141811f;
    far = 1.0f - v_exp(2.7124330518e-4f - far * t);
    v_f32 near = splat<v_f32>(-5.8876065305e-4f);
    near = near * z + 4.9731684849e-3f;
    near = near * z - 2.6753269136e-2f;
    near = near * z + 0.1128146127f;
    near = near * z - 0.3761246204f;
    near = near * z + 1.1283791065f;
    return v_copysign(select(t > splat<v_f32>(0.93f), far, near * t), x);
}
INLINE v_f64 v_erf(v_f64 x) { return libm_erf(x); }

// sin(x + quarter * pi/2); reduction by pi/2 in three parts is good to |x| <= 8192
INLINE v_f32 sine(v_f32 x, int quarter) {
    v_f32 n;
    const v_i32 q = nearest(x * 0.636619772f, n) + quarter;
    v_f32 r = x - n * 1.5703125f;
    r = r - n * 4.837512969970703125e-4f;
    r = r - n * 7.549789948768648e-8f;
    const v_f32 z = r * r;
    v_f32 s = z * -1.958789088e-4f + 8.332748271e-3f;
    s = (s * z - 0.1666666466f) * z * r + r;
    v_f32 c = z * 2.454794209e-5f - 1.388830304e-3f;
    c = (c * z + 4.166666466e-2f) * z * z - z * 0.5f + 1.0f;
    const v_f32 y = select((q & 1) != v_i32{}, c, s);
    return (v_f32)((v_i32)y ^ ((q & 2) << 30));
}
INLINE v_f32 v_sin(v_f32 x) {
    if (vm_any(v_gt(v_fabs(x), splat<v_f32>(8192)))) return libm_sin(x);
    return sine(x, 0);
}
INLINE v_f32 v_cos(v_f32 x) {
    if (vm_any(v_gt(v_fabs(x), splat<v_f32>(8192)))) return libm_cos(x);
    return sine(x, 1);
}
INLINE v_f64 v_sin(v_f64 x) { return libm_sin(x); }
INLINE v_f64 v_cos(v_f64 x) { return libm_cos(x); }

// ---- scalars: what happens once a head or a row -----------------------------------------------

#define DEFINE_SCALAR_MATH(S, SUFFIX)                                            \
    INLINE S v_exp(S x) { return __builtin_exp##SUFFIX(x); }                     \
    INLINE S v_exp2(S x) { return __builtin_exp2##SUFFIX(x); }                   \
    INLINE S v_expm1(S x) { return __builtin_expm1##SUFFIX(x); }                 \
    INLINE S v_log(S x) { return __builtin_log##SUFFIX(x); }                     \
    INLINE S v_log2(S x) { return __builtin_log2##SUFFIX(x); }                   \
    INLINE S v_log1p(S x) { return __builtin_log1p##SUFFIX(x); }                 \
    INLINE S v_sqrt(S x) { return __builtin_sqrt##SUFFIX(x); }                   \
    INLINE S v_rsqrt(S x) { return 1 / __builtin_sqrt##SUFFIX(x); }              \
    INLINE S v_sigmoid(S x) { return 1 / (1 + __builtin_exp##SUFFIX(-x)); }      \
    INLINE S v_tanh(S x) { return libm_tanh(x); }                                \
    INLINE S v_tanh_exact(S x) { return libm_tanh(x); }                          \
    INLINE S v_erf(S x) { return libm_erf(x); }                                  \
    INLINE S v_sin(S x) { return libm_sin(x); }                                  \
    INLINE S v_cos(S x) { return libm_cos(x); }
DEFINE_SCALAR_MATH(float, f)
DEFINE_SCALAR_MATH(double, )

#endif
