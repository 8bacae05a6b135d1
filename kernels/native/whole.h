// Floats as whole numbers of 16 or 8 bits under one scale, and products of pairs or fours of them: 15 bits
// and a sign are no coarser than bfloat16 where the largest float stands.
#pragma once
#include "vector.h"

namespace {

#if defined(__AVX2__)
constexpr float LARGEST = 32767;

#if defined(__AVX512F__)
typedef __m512i Shorts;
INLINE Shorts everywhere(int32_t pair) { return _mm512_set1_epi32(pair); }
#else
typedef __m256i Shorts;
INLINE Shorts everywhere(int32_t pair) { return _mm256_set1_epi32(pair); }
#endif

// sums += pairs a times pairs b. Beside the intrinsics GCC copies every sum before and after.
INLINE void add_pairs(Shorts &sums, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
#else
    Shorts both;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sums), "=&v"(both) : "v"(a), "v"(b));
#endif
}

#if defined(__AVX512VNNI__)
constexpr float LARGEST_BYTE = 127;
constexpr uint32_t TOO_LARGE = 0x80808080;  // xor adds 128 to each byte, which has no sign then

// sums += signed bytes of a times bytes b without a sign, four by four.
INLINE void add_fours(Shorts &sums, Shorts a, Shorts b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(b), "v"(a));
}

// 16 floats as whole numbers of 8 bits, which are added to a sum.
INLINE __m128i bytes_of(const float *x, float inverse, Ints &sum) {
    const __m512i found = _mm512_cvtps_epi32((__m512)(load(x) * inverse));
    sum += (Ints)found;
    return _mm512_cvtepi32_epi8(found);
}
#endif

#if defined(__AVX512F__)
// Floats x times s, from -32768 to 32767, as whole numbers in the lower 16 bits of each 32: added to
// 1.5 * 2^23, whose last bit is 1, they stand in its last bits.
INLINE Ints in_lower_bits(Floats x, Floats s) {
    return (Ints)_mm512_fmadd_ps((__m512)x, (__m512)s, _mm512_set1_ps(12582912));
}
#endif

// 16 floats as whole numbers, which are added to a sum.
INLINE __m256i shorts_of(const float *x, float inverse, Ints &sum) {
#if defined(__AVX512F__)
    const __m512i found = _mm512_cvtps_epi32((__m512)(load(x) * inverse));
    sum += (Ints)found;
    return _mm512_cvtepi32_epi16(found);
#else
    const __m256i low = _mm256_cvtps_epi32((__m256)(load(x) * inverse));
    const __m256i high = _mm256_cvtps_epi32((__m256)(load(x + W) * inverse));
    sum += (Ints)low + (Ints)high;
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
#endif
}

// The float whose bits are the most of Ints without a sign: infinity or NaN is more than any number.
INLINE float most_of(Ints bits) {
#if defined(__AVX512F__)
    const int32_t found = _mm512_reduce_max_epi32((__m512i)bits);
#else
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    const int32_t found = _mm_cvtsi128_si32(most);
#endif
    float reach;
    memcpy(&reach, &found, 4);
    return reach;
}

// The largest magnitude of whole vectors.
INLINE float reach_of(const float *x, int count) {
    Ints top = {};
    for (int c = 0; c < count; c += W) {
        const Ints size = (Ints)load(x + c) & 0x7fffffff;
        top = size > top ? size : top;
    }
    return most_of(top);
}

// The scale of floats, and what they are multiplied by to be whole numbers, `top` at most: 0 and NaN where
// one of them is not finite. Floats that are too small for a reciprocal become larger ones.
struct Steps {
    float step, inverse;

    Steps(float *x, int count, float top = LARGEST) : Steps(x, count, top, reach_of(x, count)) {}

    Steps(float *x, int count, float top, float reach) {
        float unit = 1;
        if (reach < 1e-30f) {
            unit = 0x1p-64f, reach *= 0x1p64f;
            for (int i = 0; i < count; i++) x[i] *= 0x1p64f;
        }
        const bool finite = reach <= 3.4028234e38f;
        inverse = finite && reach > 0 ? top / reach : 0;
        step = finite ? reach / top * unit : NAN;
    }
};
#endif

}  // namespace
