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
        const __m256i six = _mm256_set1_epi8(63), less = _mm256_set1_epi8(32);
        for (; i + 32 <= quarter; i += 32) {
            const __m256i x = _mm256_loadu_si256((const __m256i *)(row + i));
            const __m256i y = _mm256_loadu_si256((const __m256i *)(row + quarter + i));
            const __m256i z = _mm256_loadu_si256((const __m256i *)(row + half + i));
            put_pairs(out + 2 * i, _mm256_sub_epi8(_mm256_and_si256(x, six), less),
                      _mm256_sub_epi8(_mm256_and_si256(z, six), less));
            put_pairs(out + half + 2 * i, _mm256_sub_epi8(_mm256_and_si256(y, six), less),
                      _mm256_sub_epi8(fourth(x, y, z), less));
        }
        if (i + 16 <= quarter) {
            const __m128i x = _mm_loadu_si128((const __m128i *)(row + i));
            const __m128i y = _mm_loadu_si128((const __m128i *)(row + quarter + i));
            const __m128i z = _mm_loadu_si128((const __m128i *)(row + half + i));
            const __m256i xy = _mm256_set_m128i(y, x), z4 = _mm256_set_m128i(
                _mm256_castsi256_si128(fourth(_mm256_castsi128_si256(x), _mm256_castsi128_si256(y),
                                              _mm256_castsi128_si256(z))), z);
            const __m256i even = _mm256_sub_epi8(_mm256_and_si256(xy, six), less);
            const __m256i odd = _mm256_sub_epi8(_mm256_and_si256(z4, six), less);
            const __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
            _mm_storeu_si128((__m128i *)(out + 2 * i), _mm256_castsi256_si128(low));
            _mm_storeu_si128((__m128i *)(out + 2 * i + 16), _mm256_castsi256_si128(high));
            _mm_storeu_si128((__m128i *)(out + half + 2 * i), _mm256_extracti128_si256(low, 1));
            _mm_storeu_si128((__m128i *)(out + half + 2 * i + 16), _mm256_extracti128_si256(high, 1));
            i += 16;
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
    INLINE __m256i fourth(__m256i x, __m256i y, __m256i z) {
        const __m256i flipped = _mm256_set1_epi8(42), six = _mm256_set1_epi8(63);
        x = _mm256_srli_epi16(x, 2), y = _mm256_srli_epi16(y, 4), z = _mm256_srli_epi16(z, 6);
#if defined(__AVX512VL__)  // of two bits each, then all six, flipped
        y = _mm256_ternarylogic_epi32(_mm256_set1_epi8(3), z, y, 0xCA);
        x = _mm256_ternarylogic_epi32(_mm256_set1_epi8(15), y, x, 0xCA);
        return _mm256_ternarylogic_epi32(x, six, flipped, 0x6A);
#else
        const __m256i two = _mm256_set1_epi8(3), four = _mm256_set1_epi8(15);
        y = _mm256_or_si256(_mm256_and_si256(z, two), _mm256_andnot_si256(two, y));
        x = _mm256_or_si256(_mm256_and_si256(y, four), _mm256_andnot_si256(four, x));
        return _mm256_xor_si256(_mm256_and_si256(x, six), flipped);
#endif
    }

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
        const __m256i nibble = _mm256_set1_epi8(15);
        const __m128i of = less ? _mm_setr_epi8(8, 7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7)
                                : _mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i table = _mm256_broadcastsi128_si256(of);
        for (; i + 32 <= half; i += 32) {
            const __m256i x = _mm256_loadu_si256((const __m256i *)(row + i));
            const __m256i low = _mm256_and_si256(x, nibble);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble);
            _mm256_storeu_si256((__m256i *)(out + i), _mm256_shuffle_epi8(table, low));
            _mm256_storeu_si256((__m256i *)(out + half + i), _mm256_shuffle_epi8(table, high));
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
