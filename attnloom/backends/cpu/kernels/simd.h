// Prelude of every CPU kernel: scalar and vector types, loads, selects, reductions, half precision.
//
// Vectors are GNU vectors of the machine's native width, which gcc, clang and zig c++ all compile
// without any header. The text is the same for float and double kernels.
//
//   REAL_IS_DOUBLE  1 makes `real` double. Default 0.
//   WIDE_INTS       1 makes integer lanes 64 bits wide in float kernels. Default 0.
//
//   real   float or double              W      lanes of a vector of real
//   vf     real x W                     vm     mask of a comparison of vf: lanes are 0 or -1
//   ilane  int32, or int64 when real is double or WIDE_INTS
//   vi     ilane x W                    vim    mask of a comparison of vi (vm, unless WIDE_INTS)
#ifndef ATTNLOOM_SIMD_H
#define ATTNLOOM_SIMD_H

#ifndef REAL_IS_DOUBLE
#define REAL_IS_DOUBLE 0
#endif
#ifndef WIDE_INTS
#define WIDE_INTS 0
#endif

// A kernel tile: query rows by keys. Column-level values of a mod are arrays of TILE_N.
#ifndef TILE_M
#define TILE_M 64
#endif
#ifndef TILE_N
#define TILE_N 128
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#if REAL_IS_DOUBLE
typedef double real;
typedef i64 real_bits;
#define W (VECTOR_BYTES / 8)
#else
typedef float real;
typedef i32 real_bits;
#define W (VECTOR_BYTES / 4)
#endif

#if REAL_IS_DOUBLE || WIDE_INTS
typedef i64 ilane;
#define ILANE_BYTES 8
#else
typedef i32 ilane;
#define ILANE_BYTES 4
#endif

typedef real vf __attribute__((vector_size(VECTOR_BYTES)));
typedef real vf_unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
typedef real_bits vm __attribute__((vector_size(VECTOR_BYTES)));
typedef ilane vi __attribute__((vector_size(W * ILANE_BYTES)));
typedef ilane vi_unaligned __attribute__((vector_size(W * ILANE_BYTES), aligned(2), may_alias));
typedef ilane vim __attribute__((vector_size(W * ILANE_BYTES)));

// Vectors of W lanes of other widths, for conversions.
typedef i8 v_i8 __attribute__((vector_size(W)));
typedef u8 v_u8 __attribute__((vector_size(W)));
typedef i16 v_i16 __attribute__((vector_size(W * 2)));
typedef u16 v_u16 __attribute__((vector_size(W * 2)));
typedef i32 v_i32 __attribute__((vector_size(W * 4)));
typedef u32 v_u32 __attribute__((vector_size(W * 4)));
typedef float v_f32 __attribute__((vector_size(W * 4)));
typedef i64 v_i64 __attribute__((vector_size(W * 8)));
typedef u64 v_u64 __attribute__((vector_size(W * 8)));
typedef double v_f64 __attribute__((vector_size(W * 8)));

#define CONVERT(value, type) __builtin_convertvector(value, type)

static const real LOG2_E = (real)1.44269504088896340736;
static const real LN_2 = (real)0.69314718055994530942;
static const real REAL_INF = (real)__builtin_inf();
#if REAL_IS_DOUBLE
static const real REAL_LOWEST = -__DBL_MAX__;
#else
static const real REAL_LOWEST = -__FLT_MAX__;
#endif

// A captured tensor: strides in elements, unused dimensions unspecified.
struct TensorArg {
    const void* data;
    i64 size[8];
    i64 stride[8];
};

// Bindings of one call. Slots: the score program's first, then the mask program's.
// reals[s] and ints[s] both hold number s. grads[i]: a private buffer of captured tensor i,
// contiguous in the tensor's shape; null where no gradient is wanted.
struct ModArgs {
    const TensorArg* tensors;
    const double* reals;
    const i64* ints;
    real* const* grads;
    i64 q_len, kv_len;
};

// Set to 1 by a fragment whose captured integer does not fit the lanes; read after every task.
static thread_local int narrow_overflow_flag = 0;
INLINE int& narrow_overflow() { return narrow_overflow_flag; }

// ---- loads, stores, splats ----

INLINE vf vf_load(const real* p) { return *(const vf_unaligned*)p; }
INLINE void vf_store(real* p, vf v) { *(vf_unaligned*)p = v; }
INLINE vi vi_load(const ilane* p) { return *(const vi_unaligned*)p; }
INLINE void vi_store(ilane* p, vi v) { *(vi_unaligned*)p = v; }

// Any vector type from and to memory of any alignment.
template <class V> INLINE V load_as(const void* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}
template <class V> INLINE void store_as(void* p, V v) { __builtin_memcpy(p, &v, sizeof(V)); }

INLINE vf vf_set(real x) { return x - (vf){}; }
INLINE vi vi_set(ilane x) { return x - (vi){}; }
INLINE vm vm_set(bool x) { return (real_bits)(x ? -1 : 0) - (vm){}; }
INLINE vim vim_set(bool x) { return (ilane)(x ? -1 : 0) - (vim){}; }

// 0, 1, ... W-1
INLINE vi vi_iota() {
#if W == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif W == 8
    return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#elif W == 4
    return (vi){0, 1, 2, 3};
#else
    return (vi){0, 1};
#endif
}

// ---- masks and selects ----

INLINE vf vf_select(vm m, vf a, vf b) { return m ? a : b; }
INLINE vi vi_select(vim m, vi a, vi b) { return m ? a : b; }
// The ternaries keep the second operand when either is NaN.
INLINE vf vf_max(vf a, vf b) { return a > b ? a : b; }
INLINE vf vf_min(vf a, vf b) { return a < b ? a : b; }

INLINE vm vm_from_vim(vim m) {
#if WIDE_INTS && !REAL_IS_DOUBLE
    return CONVERT(m, vm);
#else
    return (vm)m;
#endif
}
INLINE vim vim_from_vm(vm m) {
#if WIDE_INTS && !REAL_IS_DOUBLE
    return CONVERT(m, vim);
#else
    return (vim)m;
#endif
}
INLINE vf vf_from_vi(vi v) { return CONVERT(v, vf); }

// One byte a lane, 0 or -1: how tiles keep their masks.
INLINE v_i8 bytes_from_vm(vm m) { return CONVERT(m, v_i8); }
INLINE vm vm_from_bytes(v_i8 b) { return CONVERT(b, vm); }

INLINE bool bytes_any(v_i8 b) {
#if W == 16
    u64 words[2];
    __builtin_memcpy(words, &b, 16);
    return (words[0] | words[1]) != 0;
#elif W == 8
    u64 word;
    __builtin_memcpy(&word, &b, 8);
    return word != 0;
#elif W == 4
    u32 word;
    __builtin_memcpy(&word, &b, 4);
    return word != 0;
#else
    u16 word;
    __builtin_memcpy(&word, &b, 2);
    return word != 0;
#endif
}
INLINE bool vm_any(vm m) { return bytes_any(bytes_from_vm(m)); }
INLINE bool vim_any(vim m) { return bytes_any(CONVERT(m, v_i8)); }

// ---- horizontal reductions, by halving ----

#define DEFINE_HORIZONTAL(name, COMBINE)                                                \
    template <int BYTES> struct name##_of {                                             \
        typedef real half __attribute__((vector_size(BYTES / 2)));                      \
        template <class V> static inline __attribute__((always_inline)) real run(V v) { \
            half parts[2];                                                              \
            __builtin_memcpy(parts, &v, BYTES);                                         \
            half a = parts[0], b = parts[1];                                            \
            return name##_of<BYTES / 2>::run((half)(COMBINE));                          \
        }                                                                               \
    };                                                                                  \
    template <> struct name##_of<(int)sizeof(real) * 2> {                               \
        template <class V> static inline __attribute__((always_inline)) real run(V v) { \
            real a = v[0], b = v[1];                                                    \
            return COMBINE;                                                             \
        }                                                                               \
    };                                                                                  \
    INLINE real name(vf v) { return name##_of<VECTOR_BYTES>::run(v); }
DEFINE_HORIZONTAL(vf_hsum, a + b)
DEFINE_HORIZONTAL(vf_hmax, a > b ? a : b)
DEFINE_HORIZONTAL(vf_hmin, a < b ? a : b)
#undef DEFINE_HORIZONTAL

// Lanes of two vectors in any order; indices W .. 2W-1 name lanes of b.
#if defined(__clang__) || __GNUC__ >= 12
#define VF_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define VF_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vm){__VA_ARGS__})
#endif

// ---- half precision: storage is u16, arithmetic is float ----

INLINE float float_from_bits(u32 bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
INLINE u32 bits_from_float(float x) {
    u32 bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

INLINE v_f32 f32_from_bf16(v_u16 x) { return (v_f32)(CONVERT(x, v_u32) << 16); }
INLINE float f32_from_bf16(u16 x) { return float_from_bits((u32)x << 16); }

// bfloat16, round to nearest even, in the low half of each lane. NaN stays NaN.
INLINE v_u32 bf16_bits(v_f32 x) {
    v_u32 bits = (v_u32)x;
    v_u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return x == x ? rounded : (bits >> 16) | 0x40u;
}
INLINE v_u16 bf16_from_f32(v_f32 x) { return CONVERT(bf16_bits(x), v_u16); }
INLINE u16 bf16_from_f32(float x) {
    u32 bits = bits_from_float(x);
    return x == x ? (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)
                  : (u16)((bits >> 16) | 0x40u);
}

// float16 to float without denormal arithmetic, which a process may have switched off: a subnormal
// half is m * 2^-24, and float(2^-14 * (1 + m / 2^10)) - 2^-14 has exactly that value.
#define F32_FROM_F16(FLOAT, UINT, x)                                                   \
    UINT magnitude = (x & 0x7fffu) << 13;                                              \
    UINT sign = (x & 0x8000u) << 16;                                                   \
    FLOAT normal = (FLOAT)(magnitude + (112u << 23));                                  \
    FLOAT subnormal = (FLOAT)(magnitude + (113u << 23)) - float_from_bits(113u << 23); \
    UINT finite = (UINT)(magnitude < (1u << 23) ? (UINT)subnormal : (UINT)normal);     \
    UINT bits = magnitude >= (31u << 23) ? magnitude | 0x7f800000u : finite;
INLINE v_f32 f32_from_f16(v_u16 half) {
    v_u32 x = CONVERT(half, v_u32);
    F32_FROM_F16(v_f32, v_u32, x)
    return (v_f32)(bits | sign);
}
#undef F32_FROM_F16
INLINE float f32_from_f16(u16 half) {
    v_u16 lanes = {};
    lanes[0] = half;
    return f32_from_f16(lanes)[0];
}

// float8_e5m2 is the upper half of a float16.
INLINE v_f32 f32_from_e5m2(v_u8 x) { return f32_from_f16(CONVERT(x, v_u16) << 8); }
INLINE float f32_from_e5m2(u8 x) { return f32_from_f16((u16)(x << 8)); }

// float8_e4m3fn, as float16 above: its subnormals are m * 2^-9, one pattern is NaN, none infinite.
INLINE v_f32 f32_from_e4m3(v_u8 eighth) {
    v_u32 x = CONVERT(eighth, v_u32);
    v_u32 magnitude = (x & 0x7fu) << 20;
    v_f32 normal = (v_f32)(magnitude + (120u << 23));
    v_f32 subnormal = (v_f32)(magnitude + (121u << 23)) - float_from_bits(121u << 23);
    v_u32 finite = (v_u32)(magnitude < (1u << 23) ? (v_u32)subnormal : (v_u32)normal);
    v_u32 bits = magnitude == (0x7fu << 20) ? 0x7fc00000u - (v_u32){} : finite;
    return (v_f32)(bits | (x & 0x80u) << 24);
}
INLINE float f32_from_e4m3(u8 x) {
    v_u8 lanes = {};
    lanes[0] = x;
    return f32_from_e4m3(lanes)[0];
}

// float to float16, round to nearest even, overflow to infinity. A value below the normal range is
// rounded by adding 0.5, whose last bit is worth 2^-24, a subnormal half's unit.
INLINE v_u16 f16_from_f32(v_f32 x) {
    v_u32 sign = (v_u32)x & 0x80000000u;
    v_u32 magnitude = (v_u32)x & 0x7fffffffu;
    v_u32 small = (v_u32)((v_f32)magnitude + 0.5f) - bits_from_float(0.5f);
    v_u32 normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    v_u32 bits = magnitude < (113u << 23) ? small : normal;
    bits = magnitude >= bits_from_float(65520.0f) ? 0x7c00u - (v_u32){} : bits;
    bits = x == x ? bits : 0x7e00u - (v_u32){};
    return CONVERT(bits | (sign >> 16), v_u16);
}
INLINE u16 f16_from_f32(float x) {
    v_f32 lanes = {};
    lanes[0] = x;
    return f16_from_f32(lanes)[0];
}

#endif
