// Rows of kernels/rows/int4.py become values of 8 bits and scales, as rows of kernels/rows/int8.py have.
#pragma once
#include "vector.h"

namespace {

struct Int4Keys {  // three planes of six bits, and the fourth number in the upper two of each
    static constexpr bool turned = true;
    INLINE int length(int dim) { return dim / 4 * 3 + 4; }
    INLINE float scale(const char *row, int dim) { return Float32::first(row + dim / 4 * 3); }

    INLINE void decode(const char *row, int dim, int8_t *out) {
        const int half = dim / 2, quarter = dim / 4;
        int i = 0;
#if defined(__AVX2__)
        const __m256i six = _mm256_set1_epi8(63), upper = _mm256_set1_epi8((char)192);
        const __m256i less = _mm256_set1_epi8(32), flipped = _mm256_set1_epi8(42);
        for (; i + 32 <= quarter; i += 32) {
            const __m256i x = _mm256_loadu_si256((const __m256i *)(row + i));
            const __m256i y = _mm256_loadu_si256((const __m256i *)(row + quarter + i));
            const __m256i z = _mm256_loadu_si256((const __m256i *)(row + half + i));
            __m256i fourth = _mm256_srli_epi16(_mm256_and_si256(x, upper), 2);
            fourth = _mm256_or_si256(fourth, _mm256_srli_epi16(_mm256_and_si256(y, upper), 4));
            fourth = _mm256_or_si256(fourth, _mm256_srli_epi16(_mm256_and_si256(z, upper), 6));
            fourth = _mm256_xor_si256(fourth, flipped);
            put_pairs(out + 2 * i, _mm256_sub_epi8(_mm256_and_si256(x, six), less),
                      _mm256_sub_epi8(_mm256_and_si256(z, six), less));
            put_pairs(out + half + 2 * i, _mm256_sub_epi8(_mm256_and_si256(y, six), less),
                      _mm256_sub_epi8(fourth, less));
        }
        for (; i + 16 <= quarter; i += 16) {
            const __m128i six = _mm_set1_epi8(63), upper = _mm_set1_epi8((char)192);
            const __m128i less = _mm_set1_epi8(32), flipped = _mm_set1_epi8(42);
            const __m128i x = _mm_loadu_si128((const __m128i *)(row + i));
            const __m128i y = _mm_loadu_si128((const __m128i *)(row + quarter + i));
            const __m128i z = _mm_loadu_si128((const __m128i *)(row + half + i));
            __m128i fourth = _mm_srli_epi16(_mm_and_si128(x, upper), 2);
            fourth = _mm_or_si128(fourth, _mm_srli_epi16(_mm_and_si128(y, upper), 4));
            fourth = _mm_or_si128(fourth, _mm_srli_epi16(_mm_and_si128(z, upper), 6));
            fourth = _mm_xor_si128(fourth, flipped);
            const __m128i one = _mm_sub_epi8(_mm_and_si128(x, six), less);
            const __m128i two = _mm_sub_epi8(_mm_and_si128(y, six), less);
            const __m128i three = _mm_sub_epi8(_mm_and_si128(z, six), less);
            fourth = _mm_sub_epi8(fourth, less);
            _mm_storeu_si128((__m128i *)(out + 2 * i), _mm_unpacklo_epi8(one, three));
            _mm_storeu_si128((__m128i *)(out + 2 * i + 16), _mm_unpackhi_epi8(one, three));
            _mm_storeu_si128((__m128i *)(out + half + 2 * i), _mm_unpacklo_epi8(two, fourth));
            _mm_storeu_si128((__m128i *)(out + half + 2 * i + 16), _mm_unpackhi_epi8(two, fourth));
        }
#elif defined(__ARM_NEON)
        const uint8x16_t six = vdupq_n_u8(63), upper = vdupq_n_u8(192), flipped = vdupq_n_u8(42);
        const int8x16_t less = vdupq_n_s8(32);
        for (; i + 16 <= quarter; i += 16) {
            const uint8x16_t x = vld1q_u8((const uint8_t *)row + i);
            const uint8x16_t y = vld1q_u8((const uint8_t *)row + quarter + i);
            const uint8x16_t z = vld1q_u8((const uint8_t *)row + half + i);
            uint8x16_t fourth = vshrq_n_u8(vandq_u8(x, upper), 2);
            fourth = vorrq_u8(fourth, vshrq_n_u8(vandq_u8(y, upper), 4));
            fourth = veorq_u8(vorrq_u8(fourth, vshrq_n_u8(z, 6)), flipped);
            const int8x16x2_t first = {{vsubq_s8(vreinterpretq_s8_u8(vandq_u8(x, six)), less),
                                        vsubq_s8(vreinterpretq_s8_u8(vandq_u8(z, six)), less)}};
            const int8x16x2_t second = {{vsubq_s8(vreinterpretq_s8_u8(vandq_u8(y, six)), less),
                                         vsubq_s8(vreinterpretq_s8_u8(fourth), less)}};
            vst2q_s8(out + 2 * i, first), vst2q_s8(out + half + 2 * i, second);
        }
#endif
        for (; i < quarter; i++) {
            const int x = (uint8_t)row[i], y = (uint8_t)row[quarter + i], z = (uint8_t)row[half + i];
            out[2 * i] = (int8_t)((x & 63) - 32);
            out[2 * i + 1] = (int8_t)((z & 63) - 32);
            out[half + 2 * i] = (int8_t)((y & 63) - 32);
            out[half + 2 * i + 1] = (int8_t)(((x >> 6 << 4 | y >> 6 << 2 | z >> 6) ^ 42) - 32);
        }
    }

#if defined(__AVX2__)
    INLINE void put_pairs(int8_t *out, __m256i even, __m256i odd) {  // 64 elements
        const __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
        _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256((__m256i *)(out + 32), _mm256_permute2x128_si256(low, high, 0x31));
    }
#endif
};

struct Int4Values {  // a nibble of an element's number and 8
    static constexpr bool turned = true;
    INLINE int length(int dim) { return dim / 2 + 4; }
    // weights times scales are digits without a sign: that of a scale goes with the numbers
    INLINE float scale(const char *row, int dim) { return fabsf(Float32::first(row + dim / 2)); }

    INLINE void decode(const char *row, int dim, int8_t *out) {
        const int half = dim / 2;
        const bool less = Float32::first(row + half) < 0;
        int i = 0;
#if defined(__AVX2__)
        const __m256i nibble = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(less ? -1 : 1);
        const __m256i eight = _mm256_set1_epi8(8);
        for (; i + 32 <= half; i += 32) {
            const __m256i x = _mm256_loadu_si256((const __m256i *)(row + i));
            const __m256i low = _mm256_sub_epi8(_mm256_and_si256(x, nibble), eight);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble);
            _mm256_storeu_si256((__m256i *)(out + i), _mm256_sign_epi8(low, sign));
            _mm256_storeu_si256((__m256i *)(out + half + i),
                                _mm256_sign_epi8(_mm256_sub_epi8(high, eight), sign));
        }
#elif defined(__ARM_NEON)
        for (; i + 16 <= half; i += 16) {
            const uint8x16_t x = vld1q_u8((const uint8_t *)row + i);
            const int8x16_t low = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8(15))), vdupq_n_s8(8));
            const int8x16_t high = vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(x, 4)), vdupq_n_s8(8));
            vst1q_s8(out + i, less ? vnegq_s8(low) : low);
            vst1q_s8(out + half + i, less ? vnegq_s8(high) : high);
        }
#endif
        for (; i < half; i++) {
            const int low = (row[i] & 15) - 8, high = (row[i] >> 4 & 15) - 8;
            out[i] = (int8_t)(less ? -low : low);
            out[half + i] = (int8_t)(less ? -high : high);
        }
    }
};

}  // namespace
