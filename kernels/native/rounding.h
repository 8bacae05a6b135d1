// Elements of each dtype from floats: rounded to the nearest, ties to even, as torch rounds.
#pragma once
#include "vector.h"

namespace {

template <class K>
struct Kept;  // how floats are kept in a dtype of vector.h

template <>
struct Kept<Float32> {
    typedef float Element;
    INLINE Floats rounded(Floats x) { return x; }
    INLINE void write(float *to, Floats x) { store(to, x); }
};

template <>
struct Kept<BFloat16> {
    typedef uint16_t Element;
    INLINE Floats rounded(Floats x) {
        const Ints bits = (Ints)x, up = ((bits >> 16) & 1) + 0x7fff;
        return x == x ? (Floats)((bits + up) & (Ints{} - 65536)) : x;
    }
    INLINE void write(uint16_t *to, Floats x) {
        *(Halves *)to = __builtin_convertvector((Ints)rounded(x) >> 16 & 0xffff, Halves);
    }
};

#if defined(HAS_FLOAT16)
template <>
struct Kept<Float16> {
    typedef uint16_t Element;
#if defined(__AVX512F__)
    INLINE __m256i narrow(Floats x) { return _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
    INLINE Floats rounded(Floats x) { return (Floats)_mm512_cvtph_ps(narrow(x)); }
    INLINE void write(uint16_t *to, Floats x) { _mm256_storeu_si256((__m256i *)to, narrow(x)); }
#elif defined(__ARM_NEON)
    INLINE float16x4_t narrow(Floats x) { return vcvt_f16_f32((float32x4_t)x); }
    INLINE Floats rounded(Floats x) { return (Floats)vcvt_f32_f16(narrow(x)); }
    INLINE void write(uint16_t *to, Floats x) { *(Halves *)to = (Halves)narrow(x); }
#else
    INLINE __m128i narrow(Floats x) { return _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
    INLINE Floats rounded(Floats x) { return (Floats)_mm256_cvtph_ps(narrow(x)); }
    INLINE void write(uint16_t *to, Floats x) { _mm_storeu_si128((__m128i *)to, narrow(x)); }
#endif
};
#endif

// The first `count` of W elements of a row, and how they are written.
template <class K>
INLINE Floats read_some(const void *row, long i, int count) {
    if (count >= W) return K::read((const char *)row + i * K::bytes, 0);
    char some[W * K::bytes] = {};
    memcpy(some, (const char *)row + i * K::bytes, count * K::bytes);
    return K::read(some, 0);
}

template <class K>
INLINE void write_some(void *row, long i, int count, Floats x) {
    typedef typename Kept<K>::Element Element;
    Element *to = (Element *)row + i;
    if (count >= W) return Kept<K>::write(to, x);
    Element some[W];
    Kept<K>::write(some, x);
    memcpy(to, some, count * sizeof(Element));
}

}  // namespace
