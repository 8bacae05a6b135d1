// Vectors of floats as wide as this machine's registers, and how rows of each dtype become floats.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#include "kinds.h"

// What this build multiplies or converts in one instruction.
#if defined(__F16C__) || defined(__ARM_NEON)
#define HAS_FLOAT16 1
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIRS 1
#endif
#if defined(__AVX512VNNI__) || (defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD))
#define HAS_INTEGERS 1
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__ARM_NEON)
constexpr int W = 4;  // GCC keeps a vector of two registers in memory
#else
constexpr int W = 8;
#endif
#if defined(__clang__)  // arrays of sums then lie in registers
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * W), aligned(2), may_alias));

INLINE Floats all(float x) { return x - Floats{}; }
INLINE Floats load(const float *p) { return *(const Floats *)p; }
INLINE void store(float *p, Floats x) { *(Floats *)p = x; }
INLINE Floats most(Floats a, Floats b) { return a > b ? a : b; }

// A product that -ffp-contract=fast must not round together with a sum.
#if defined(__aarch64__)
#define IN_REGISTER "+w"
#else
#define IN_REGISTER "+v"
#endif
INLINE Floats apart(Floats x) {
    asm("" : IN_REGISTER(x));
    return x;
}
INLINE float apart(float x) {
    asm("" : IN_REGISTER(x));
    return x;
}

INLINE void fetch(const char *row, int bytes) {
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

// Rows to fetch, fewer than are read: `step` 256ths of one for each.
struct Spread {
    const char *const *rows;
    int step;
    __attribute__((always_inline)) const char *operator[](int i) const { return rows[i * step >> 8]; }
};

// One reader per dtype: elements i .. i+W-1 of a row as floats, and the scale behind a packed row.
struct Float32 {
    static constexpr int bytes = 4;
    static constexpr bool scaled = false, integers = false, pairs = false;
    INLINE Floats read(const char *row, int i) { return load((const float *)row + i); }
    INLINE float scale(const char *, int) { return 1; }
    INLINE float first(const char *p) {  // wherever it lies
        float found;
        memcpy(&found, p, 4);
        return found;
    }
};

struct BFloat16 {
    static constexpr int bytes = 2;
    static constexpr bool scaled = false, integers = false, pairs = true;
    INLINE Floats read(const char *row, int i) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // GCC converts the halves of a vector apart
        return (Floats)((Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(row + 2 * i))) << 16);
#elif defined(__ARM_NEON)
        return (Floats)vshll_n_u16((uint16x4_t)*(const Halves *)(row + 2 * i), 16);
#else
        const Halves *from = (const Halves *)(row + 2 * i);
        return (Floats)(__builtin_convertvector(*from, Ints) << 16);
#endif
    }
    INLINE float scale(const char *, int) { return 1; }
};

#if defined(HAS_FLOAT16)
struct Float16 {
    static constexpr int bytes = 2;
    static constexpr bool scaled = false, integers = false, pairs = false;
    INLINE Floats read(const char *row, int i) {
#if defined(__AVX512F__)
        return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(row + 2 * i)));
#elif defined(__ARM_NEON)
        return (Floats)vcvt_f32_f16((float16x4_t)*(const Halves *)(row + 2 * i));
#else
        return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + 2 * i)));
#endif
    }
    INLINE float scale(const char *, int) { return 1; }
};
#endif

#if defined(__ARM_NEON)
INLINE int16x4_t four_bytes(const char *p) {  // as numbers with a sign
    int32_t found;
    memcpy(&found, p, 4);
    return vget_low_s16(vmovl_s8(vcreate_s8((uint32_t)found)));
}
#endif

// rows of kernels/rows/int8.py: `dim` values and a float32 scale
struct Int8 {
    static constexpr int bytes = 1;
    static constexpr bool scaled = true, integers = true, pairs = false;
    INLINE Floats read(const char *row, int i) {
#if defined(__AVX512F__)
        const __m128i values = _mm_loadu_si128((const __m128i *)(row + i));
        return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(values));
#elif defined(__AVX2__)
        const __m128i values = _mm_loadl_epi64((const __m128i *)(row + i));
        return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values));
#elif defined(__ARM_NEON)
        return (Floats)vcvtq_f32_s32(vmovl_s16(four_bytes(row + i)));
#else
        Floats found;
        for (int j = 0; j < W; j++) found[j] = (int8_t)row[i + j];
        return found;
#endif
    }
    INLINE float scale(const char *row, int dim) { return Float32::first(row + dim); }
};

#if defined(HAS_FLOAT16)
// rows of kernels/rows/fp8.py: the bits of a value are those of a float16 of a 256th of it
struct Float8 {
    static constexpr int bytes = 1;
    static constexpr bool scaled = true, integers = false, pairs = false;
    INLINE Floats read(const char *row, int i) {
#if defined(__AVX512F__)
        const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(row + i)));
        const __m256i size = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(0x3F80));
        const __m256i sign = _mm256_and_si256(x, _mm256_set1_epi16((short)0x8000));
        return (Floats)_mm512_cvtph_ps(_mm256_or_si256(size, sign));
#elif defined(__ARM_NEON)
        const int16x4_t x = four_bytes(row + i);
        const int16x4_t size = vand_s16(vshl_n_s16(x, 7), vdup_n_s16(0x3F80));
        const int16x4_t sign = vand_s16(x, vdup_n_s16((int16_t)0x8000));
        return (Floats)vcvt_f32_f16(vreinterpret_f16_s16(vorr_s16(size, sign)));
#else
        const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(row + i)));
        const __m128i size = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(0x3F80));
        const __m128i sign = _mm_and_si128(x, _mm_set1_epi16((short)0x8000));
        return (Floats)_mm256_cvtph_ps(_mm_or_si128(size, sign));
#endif
    }
    INLINE float scale(const char *row, int dim) { return Float32::first(row + dim) * 256; }
};
#endif

INLINE float largest(Floats x) {
    float found = x[0];
    for (int i = 1; i < W; i++) found = x[i] > found ? x[i] : found;
    return found;
}

INLINE float total(Floats x) {
#if defined(__ARM_NEON)
    return vaddvq_f32((float32x4_t)x);
#else
    float found = 0;
    for (int i = 0; i < W; i++) found += x[i];
    return found;
#endif
}

// exp to 2 units in the last place; 0 below the least normal number and at -inf, NaN at NaN.
// Powers of two by their bits; a polynomial of degree 6 on the rest, |r| <= ln 2 / 2
// (Cephes, expf.c).
INLINE Floats exponential(Floats x) {
    const Floats clamped = x < -87.33654f ? all(-87.33654f) : x;
    const Floats whole = (clamped * 1.44269504f + 12582912.f) - 12582912.f;
    const Floats r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    const Floats found = (Floats)((Ints)p + (__builtin_convertvector(whole, Ints) << 23));
    return x < -87.33654f ? Floats{} : found;
}

// exp(x) of an x that is at most 0; 0 at -inf, NaN at NaN.
INLINE Floats fading(Floats x) {
#if defined(__AVX512F__)
    // as `exponential`, but the instruction that scales by powers of two ends at 0 by itself
    const __m512 y = _mm512_max_ps(_mm512_set1_ps(-110), (__m512)x);
    const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504f)), 8);
    const Floats n = (Floats)whole, r = ((Floats)y - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    return (Floats)_mm512_scalef_ps((__m512)p, whole);
#else
    return exponential(x);
#endif
}

// x * sigmoid(x). exp(88) is finite; below -88, where it is nothing, it stays -5e-37. NaN stays NaN.
INLINE Floats silu(Floats x) {
    x = x < -88 ? all(-88) : x;
    return x / (1 + exponential(-x));
}

// cap * tanh(x / cap), as kernels/launch/softmax.py has it in a kernel: tanh(y) is 1 - 2 / (e^2y + 1).
INLINE Floats capped(Floats x, float cap) {
    const Floats y = x * (2 / cap);
    return cap - 2 * cap / (exponential(y > 87 ? all(87) : y) + 1);
}

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Halfway to the sums of four vectors: vectors of 128 bits of four sums, to be joined.
INLINE Floats four_totals(const Floats *a) {
#if defined(__AVX512F__)
    Floats t[2];
    UNROLL for (int i = 0; i < 2; i++) {
        const __m512 one = (__m512)a[2 * i], two = (__m512)a[2 * i + 1];
        t[i] = (Floats)_mm512_shuffle_ps(one, two, 0x88) + (Floats)_mm512_shuffle_ps(one, two, 0xdd);
    }
    const __m512 one = (__m512)t[0], two = (__m512)t[1];
    return (Floats)_mm512_shuffle_ps(one, two, 0x88) + (Floats)_mm512_shuffle_ps(one, two, 0xdd);
#elif defined(__AVX2__)
    const __m256 one = _mm256_hadd_ps((__m256)a[0], (__m256)a[1]), two = _mm256_hadd_ps((__m256)a[2], (__m256)a[3]);
    return (Floats)_mm256_hadd_ps(one, two);
#elif defined(__ARM_NEON)
    const float32x4_t one = vpaddq_f32((float32x4_t)a[0], (float32x4_t)a[1]);
    return (Floats)vpaddq_f32(one, vpaddq_f32((float32x4_t)a[2], (float32x4_t)a[3]));
#else
    Floats t = {};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < W; j++) t[j / 4 * 4 + i] += a[i][j];
    return t;
#endif
}

// The sums of W vectors of which fours have been summed halfway, in their order.
INLINE Floats join_totals(const Floats *t) {
#if defined(__AVX512F__)
    const __m512 a = (__m512)t[0], b = (__m512)t[1], c = (__m512)t[2], d = (__m512)t[3];
    const Floats one = (Floats)_mm512_shuffle_f32x4(a, b, 0x88) + (Floats)_mm512_shuffle_f32x4(a, b, 0xdd);
    const Floats two = (Floats)_mm512_shuffle_f32x4(c, d, 0x88) + (Floats)_mm512_shuffle_f32x4(c, d, 0xdd);
    return (Floats)_mm512_shuffle_f32x4((__m512)one, (__m512)two, 0x88) +
           (Floats)_mm512_shuffle_f32x4((__m512)one, (__m512)two, 0xdd);
#elif defined(__AVX2__)
    return PICK(t[0], t[1], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(t[0], t[1], 4, 5, 6, 7, 12, 13, 14, 15);
#elif defined(__ARM_NEON)
    return t[0];
#else
    Floats found;
    for (int i = 0; i < W; i++) found[i] = t[i / 4][i % 4] + t[i / 4][4 + i % 4];
    return found;
#endif
}

// The sums of W vectors, in their order, as one vector: log2(W) rounds of two shuffles and a sum.
INLINE Floats totals(const Floats *a) {
    Floats t[W / 4];
    UNROLL for (int i = 0; i < W / 4; i++) t[i] = four_totals(a + 4 * i);
    return join_totals(t);
}

#if defined(HAS_PAIRS)
// sum + the products of both halves of the elements of a and b, which are bfloat16.
INLINE Floats add_pairs(Floats sum, Floats a, Floats b) {
#if defined(__ARM_NEON)
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
}

// Elements as bfloat16, rounded to the nearest.
INLINE Halves narrow_halves(Floats x) {
#if defined(__ARM_NEON)
    return (Halves)vcvt_bf16_f32((float32x4_t)x);
#else
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#endif
}
#endif

}  // namespace

// Returns what `call` returns for the reader of a kind, 1 for a kind that this build lacks.
#if defined(HAS_FLOAT16)
#define OF_KIND(kind, call) \
    if (kind == FLOAT32) return call(Float32); \
    if (kind == BFLOAT16) return call(BFloat16); \
    return kind == FLOAT16 ? call(Float16) : 1
#else
#define OF_KIND(kind, call) \
    if (kind == FLOAT32) return call(Float32); \
    return kind == BFLOAT16 ? call(BFloat16) : 1
#endif
