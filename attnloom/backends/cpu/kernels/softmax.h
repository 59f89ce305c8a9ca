// The exponential of the online softmax, and the units of scores inside the kernels.
//
// Scores are natural, and log2(e) multiplies only their small difference from a maximum or an lse.
// Folding it into the scale costs as much, but rounds the scores themselves: in float32 twice the
// error at scores of hundreds. A mod may also return the lowest finite number to hide a key, which
// times log2(e) would overflow and turn a uniform row into an empty one.
#ifndef ATTNLOOM_SOFTMAX_H
#define ATTNLOOM_SOFTMAX_H

#include "args.h"

INLINE real score_scale(const AttentionArgs& args) { return (real)args.scale; }

// A value that no multiply-add takes up unrounded: the backward's scores are those of the forward
// to the last bit, as out and l follow from them (dV for scores of hundreds: 3 times the accuracy).
INLINE vf rounded(vf product) {
#if defined(__x86_64__)
    asm("" : "+v"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#endif
    return product;
}

extern "C" float logf(float);
extern "C" double log(double);
INLINE real natural_log(real x) {
#if REAL_IS_DOUBLE
    return log(x);
#else
    return logf(x);
#endif
}

// 2^r for |r| <= 1/2. Minimax in relative error: 2.0e-9 (float); Taylor to 4e-18 (double).
INLINE vf exp2_fraction(vf r) {
#if REAL_IS_DOUBLE
    static const real coefficients[] = {1.3691488853904124e-12, 2.5678435993488196e-11,
                                        4.4455382718708110e-10, 7.0549116208011210e-09,
                                        1.0178086009239696e-07, 1.3215486790144305e-06,
                                        1.5252733804059838e-05, 1.5403530393381606e-04,
                                        1.3333558146428441e-03, 9.6181291076284770e-03,
                                        5.5504108664821576e-02, 2.4022650695910070e-01,
                                        6.9314718055994530e-01, 1.0};
#else
    static const real coefficients[] = {1.5353362e-4f, 1.3398874e-3f, 9.6184369e-3f, 5.5503324e-2f,
                                        2.4022648e-1f, 6.9314718e-1f, 1.0f};
#endif
    vf p = vf_set(coefficients[0]);
#pragma GCC unroll 16
    for (unsigned i = 1; i < sizeof(coefficients) / sizeof(real); i++) p = p * r + coefficients[i];
    return p;
}

#if BF16_PAIRS
// 2^x for x <= 127; 0 gives 1, -inf gives 0 and NaN stays NaN. Probabilities are rounded to 4e-3
// here, so the polynomial for the fraction, minimax in relative error, may be off by 2.9e-6. Six
// instructions: one takes the fraction (0 of an infinity), one scales by the power, floored by it.
INLINE vf exp2_lanes(vf x) {
    static const real coefficients[] = {1.34266861e-2f, 5.22424713e-2f, 2.41280206e-1f,
                                        6.93044845e-1f, 1.0f};
    vf fraction, power;
    asm("vreduceps $9, %1, %0" : "=v"(fraction) : "v"(x));
    vf p = vf_set(coefficients[0]);
#pragma GCC unroll 8
    for (int i = 1; i < 5; i++) p = p * fraction + coefficients[i];
    asm("vscalefps %2, %1, %0" : "=v"(power) : "v"(p), "v"(x));
    return power;
}
#endif

// e^x for x <= 88 (709 in double); -inf gives 0 and NaN stays NaN. x * log2(e) = n + r with
// |r| <= 1/2. For r the product is formed again inside a multiply-add, which does not round it;
// `same` keeps the compiler from reusing the rounded one.
INLINE vf softmax_exp(vf x) {
#if BF16_PAIRS
    return exp2_lanes(x * LOG2_E);
#elif defined(__AVX512F__)
    // Rounding and scaling by 2^n are single instructions: 12 an exponential instead of 16.
#if REAL_IS_DOUBLE
#define LANE_SUFFIX "pd"
#else
#define LANE_SUFFIX "ps"
#endif
    vf clamped = vf_max(vf_set(-1400), x), same = rounded(clamped), n, power;
    asm("vrndscale" LANE_SUFFIX " $0, %1, %0" : "=v"(n) : "v"(clamped * LOG2_E));
    asm("vscalef" LANE_SUFFIX " %2, %1, %0"
        : "=v"(power)
        : "v"(exp2_fraction(same * LOG2_E - n)), "v"(n));
#undef LANE_SUFFIX
    return power;
#else
    // Zero where the result would be subnormal.
    const real lowest = REAL_IS_DOUBLE ? (real)-708.39 : (real)-87.33;
    const real to_integer = REAL_IS_DOUBLE ? (real)6755399441055744.0 : (real)12582912.0;
    const int mantissa_bits = REAL_IS_DOUBLE ? 52 : 23;
    vf clamped = x < lowest ? vf_set(lowest) : x;
    vf shifted = clamped * LOG2_E + to_integer;
    vf p = exp2_fraction(clamped * LOG2_E - (shifted - to_integer));
    vf power = (vf)((vm)p + ((vm)shifted << mantissa_bits));
    return x < lowest ? (vf){} : power;
#endif
}
INLINE real softmax_exp(real x) { return softmax_exp(vf_set(x))[0]; }

#if BF16_PAIRS
// Rounds to nearest even, subnormals to zero.
INLINE v_u16 bf16_rounded(vf x) {
    v_u16 bits;
    asm("vcvtneps2bf16 %1, %0" : "=v"(bits) : "v"(x));
    return bits;
}
// Two vectors at once, for the price of one.
typedef u16 v_bf16_rows __attribute__((vector_size(VECTOR_BYTES)));
INLINE v_bf16_rows bf16_rounded(vf even, vf odd) {
    v_bf16_rows bits;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(bits) : "v"(odd), "v"(even));
    return bits;
}
// Lane i: element i of the first and of the second vector.
INLINE vf pairs_of(v_bf16_rows rows) {
    const v_bf16_rows order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    v_bf16_rows pairs;
    asm("vpermw %1, %2, %0" : "=v"(pairs) : "v"(rows), "v"(order));
    return (vf)pairs;
}
#endif

#endif
