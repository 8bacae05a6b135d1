// Rows of kernels/rows/int4.py become values of 8 bits and scales, as rows of kernels/rows/int8.py have.
#pragma once
#include "vector.h"

namespace {

INLINE float bfloat16_at(const char *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

struct Int4Keys {  // 5 bits c + 16 of a number 2 c + 1: twice the bits, less 31
    INLINE int length(int dim) { return dim / 2 + dim / 8 + 4; }
    INLINE float scale(const char *row, int dim) { return Float32::first(row + dim / 2 + dim / 8); }

    INLINE void decode(const char *row, int dim, int8_t *out) {
        const int half = dim / 2, run = dim / 8;  // byte i of the upper bits: elements i, i + run ..
        const char *upper = row + half;
#if defined(__AVX2__)
        if (run == 8 || run == 16 || run == 32) {
            const __m256i even = _mm256_set1_epi8(30), less = _mm256_set1_epi8(31);
            for (int at = 0; at < half; at += 32) {
                const __m256i x = _mm256_loadu_si256((const __m256i *)(row + at));
                const __m256i low = _mm256_and_si256(_mm256_add_epi8(x, x), even);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 3), even);
                const __m256i above = upper_bits(upper, run, at), below = upper_bits(upper, run, half + at);
                _mm256_storeu_si256((__m256i *)(out + at),
                                    _mm256_sub_epi8(_mm256_or_si256(low, above), less));
                _mm256_storeu_si256((__m256i *)(out + half + at),
                                    _mm256_sub_epi8(_mm256_or_si256(high, below), less));
            }
            return;
        }
#endif
        for (int i = 0; i < half; i++) {
            out[i] = (row[i] & 15) * 2 - 31;
            out[half + i] = (row[i] >> 4 & 15) * 2 - 31;
        }
        for (int i = 0; i < run; i++)
            for (int bit = 0; bit < 8; bit++) out[bit * run + i] += (upper[i] >> bit & 1) << 5;
    }

#if defined(__AVX2__)
    // 32 in each of the elements at .. at + 31 whose upper bit is set
    INLINE __m256i upper_bits(const char *upper, int run, int at) {
        __m256i bytes, bits;
        if (run == 8) {
            int64_t found;
            memcpy(&found, upper, 8);
            bytes = _mm256_set1_epi64x(found);
            bits = _mm256_setr_epi64x(0x0101010101010101, 0x0202020202020202, 0x0404040404040404,
                                      0x0808080808080808);
        } else if (run == 16) {
            bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)upper));
            bits = _mm256_setr_m128i(_mm_set1_epi8(1), _mm_set1_epi8(2));
        } else {
            bytes = _mm256_loadu_si256((const __m256i *)upper);
            bits = _mm256_set1_epi8(1);
        }
        bits = _mm256_slli_epi64(bits, at / run);
        return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits), _mm256_set1_epi8(32));
    }
#endif
};

// number times factor, by the factor less 1 and the 4 bits c + 8 of a number 2 c + 1
struct Products {
    alignas(16) int8_t of[16][16];
    constexpr Products() : of() {
        for (int factor = 0; factor < 16; factor++)
            for (int code = 0; code < 16; code++) of[factor][code] = (int8_t)((2 * code - 15) * (factor + 1));
    }
};
static constexpr Products PRODUCTS;

struct Int4Values {
    INLINE int length(int dim) { return dim / 2 + ((dim / 32 + 1) / 2 + 5) / 4 * 4; }
    INLINE float scale(const char *row, int dim) { return bfloat16_at(row + length(dim) - 2); }

    INLINE void decode(const char *row, int dim, int8_t *out) {
        const int half = dim / 2;
        uint32_t factors;
        memcpy(&factors, row + half, 4);  // of 32 elements a nibble each
#if defined(__AVX2__)
        if (dim % 64 == 0) {
            const __m256i nibble = _mm256_set1_epi8(15);
            for (int at = 0; at < half; at += 32) {
                const __m256i x = _mm256_loadu_si256((const __m256i *)(row + at));
                const __m256i low = _mm256_and_si256(x, nibble);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble);
                _mm256_storeu_si256((__m256i *)(out + at), _mm256_shuffle_epi8(table(factors, at), low));
                _mm256_storeu_si256((__m256i *)(out + half + at),
                                    _mm256_shuffle_epi8(table(factors, half + at), high));
            }
            return;
        }
#endif
        for (int i = 0; i < half; i++) {
            out[i] = PRODUCTS.of[factors >> i / 32 * 4 & 15][row[i] & 15];
            out[half + i] = PRODUCTS.of[factors >> (half + i) / 32 * 4 & 15][row[i] >> 4 & 15];
        }
    }

#if defined(__AVX2__)
    INLINE __m256i table(uint32_t factors, int at) {
        const int8_t *found = PRODUCTS.of[factors >> at / 32 * 4 & 15];
        return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)found));
    }
#endif
};

}  // namespace
