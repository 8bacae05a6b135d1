// Products with rows of 8 bits by AVX512-VNNI: whole numbers of 8 bits times whole numbers of 8 bits,
// four of them and their sum in one operation, where floats take a conversion and an operation each.
// A float goes in as a number of 24 bits in three digits, so nothing is lost beside float32.
#pragma once
#include "vector.h"

namespace {

constexpr int WIDEST = 256;  // the widest head: sums stay below 2^31

#if defined(__AVX512VNNI__)
constexpr int DIGITS = 3;
constexpr float UNIT = 8323072, WHOLE = 16777000;  // the largest number: signed, and without a sign

INLINE __m512i four(const void *p) {  // 4 bytes in all lanes
    int32_t found;
    memcpy(&found, p, 4);
    return _mm512_set1_epi32(found);
}

// sums += unsigned bytes of `plain` times signed ones, four by four. Beside the intrinsic GCC copies
// every sum before and after.
INLINE void add_products(__m512i &sums, __m512i plain, __m512i with_sign) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(plain), "v"(with_sign));
}
INLINE void add_products_of_four(__m512i &sums, __m512i plain, const int8_t *with_sign) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(plain), "m"(*(const int32_t *)with_sign));
}

INLINE __m512i joined(const char *const *rows, int d) {  // 16 bytes of rows 0, 4, 8 and 12
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[0] + d)));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(rows[4] + d)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(rows[8] + d)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(rows[12] + d)), 3);
}

// Digits of a query [dim], the weight of its last digit, and what values that are 128 too large add.
struct Digits {
    alignas(64) int8_t of[DIGITS][WIDEST];
    float step;
    int excess[DIGITS];

    // Returns false for a query that is not finite, or too small for a reciprocal.
    bool set(const float *q, int dim) {
        Floats top = {};
        float sum = 0;
        for (int d = 0; d < dim; d += W) {
            const Floats x = load(q + d), size = most(x, -x);
            top = most(top, size);
            sum += total(size);
        }
        const float reach = largest(top);
        if (!(sum < INFINITY) || (reach < 1e-30f && reach > 0)) return false;
        step = reach / UNIT;
        const float inverse = reach > 0 ? UNIT / reach : 0;
        for (int g = 0; g < DIGITS; g++) excess[g] = 0;
        for (int d = 0; d < dim; d += W) {
            __m512i x = _mm512_cvtps_epi32((__m512)(load(q + d) * inverse));
            for (int g = DIGITS; g--;) {  // the last digit first; each is at least -128
                const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24);
                _mm_store_si128((__m128i *)(of[g] + d), _mm512_cvtepi32_epi8(digit));
                excess[g] -= 128 * _mm512_reduce_add_epi32(digit);
                x = _mm512_srai_epi32(_mm512_sub_epi32(x, digit), 8);
            }
        }
        return true;
    }
};

// The three sums of digits as one float, in units of the last.
INLINE Floats number(const __m512i *sums) {
    const __m512i low = _mm512_add_epi32(_mm512_slli_epi32(sums[1], 8), sums[2]);
    return (Floats)_mm512_cvtepi32_ps(sums[0]) * 65536.f + (Floats)_mm512_cvtepi32_ps(low);
}

// Products of T queries with `rows`, whose list goes on for 16 behind `count`: l [T][stride].
template <int T>
INLINE void integer_logits(const Digits *q, const char *const *rows, int ahead, const char *const *values,
                           int count, int dim, float *l, int stride) {
    for (int t = 0; t < count; t += 16) {
        __m512i sums[T][DIGITS];
        for (int r = 0; r < T; r++)
            for (int g = 0; g < DIGITS; g++) sums[r][g] = _mm512_set1_epi32(q[r].excess[g]);
        for (int i = 0; i < 16; i++) fetch(rows[t + i + ahead], dim + 4), fetch(values[t + i], dim + 4);
        for (int d = 0; d < dim; d += 16) {
            __m512i x[4], y[4];
            for (int i = 0; i < 4; i++) x[i] = joined(rows + t + i, d);
            y[0] = _mm512_unpacklo_epi32(x[0], x[1]), y[1] = _mm512_unpackhi_epi32(x[0], x[1]);
            y[2] = _mm512_unpacklo_epi32(x[2], x[3]), y[3] = _mm512_unpackhi_epi32(x[2], x[3]);
            x[0] = _mm512_unpacklo_epi64(y[0], y[2]), x[1] = _mm512_unpackhi_epi64(y[0], y[2]);
            x[2] = _mm512_unpacklo_epi64(y[1], y[3]), x[3] = _mm512_unpackhi_epi64(y[1], y[3]);
            UNROLL for (int i = 0; i < 4; i++) {  // lane t: elements d + 4 i .. d + 4 i + 3 of row t
                const __m512i value = _mm512_xor_si512(x[i], _mm512_set1_epi8(-128));
                UNROLL for (int r = 0; r < T; r++)
                    UNROLL for (int g = 0; g < DIGITS; g++)
                        add_products_of_four(sums[r][g], value, q[r].of[g] + d + 4 * i);
            }
        }
        for (int r = 0; r < T; r++) store(l + r * stride + t, number(sums[r]) * q[r].step);
    }
}

// Digits of weights >= 0: w [rows], a multiple of 16 of them.
struct Weights {
    float step;

    // Returns false for weights that are not finite, or too small for a reciprocal.
    template <int ROWS>
    bool set(const float *w, int count, uint8_t (*of)[ROWS]) {
        Floats top = {}, sum = {};
        for (int t = 0; t < count; t += W) top = most(top, load(w + t)), sum += load(w + t);
        const float reach = largest(top);
        if (!(total(sum) < INFINITY) || (reach < 1e-30f && reach > 0)) return false;
        step = reach / WHOLE;
        const float inverse = reach > 0 ? WHOLE / reach : 0;
        for (int t = 0; t < count; t += W) {
            const __m512i x = _mm512_cvtps_epi32((__m512)(load(w + t) * inverse));
            for (int g = 0; g < DIGITS; g++) {
                const __m512i digit = _mm512_srli_epi32(x, 16 - 8 * g);
                _mm_storeu_si128((__m128i *)(of[g] + t), _mm512_cvtepi32_epi8(digit));
            }
        }
        return true;
    }
};

// Adds weights times the values `rows` to columns d .. of out [T][dim], `lanes` times 16 of them: of
// every 16 the quarters Q, each four elements.
template <int T, int... Q, int ROWS>
INLINE void add_quarters(const uint8_t (*w)[DIGITS][ROWS], const Weights *weights, const char *const *rows,
                         int count, int dim, int d, int lanes, float *out) {
    constexpr int N = sizeof...(Q), quarters[] = {Q...};
    __m512i sums[T][N][DIGITS];
    UNROLL for (int r = 0; r < T; r++)
        UNROLL for (int i = 0; i < N; i++)
            UNROLL for (int g = 0; g < DIGITS; g++) sums[r][i][g] = _mm512_setzero_si512();
    const __mmask64 mask = lanes < 4 ? (1ull << 16 * lanes) - 1 : ~0ull;
    for (int t = 0; t < count; t += 4) {
        __m512i x[4], y[2];
        for (int i = 0; i < 4; i++) x[i] = _mm512_maskz_loadu_epi8(mask, rows[t + i] + d);
        if (quarters[0] > 1) y[0] = _mm512_unpackhi_epi8(x[0], x[1]), y[1] = _mm512_unpackhi_epi8(x[2], x[3]);
        else y[0] = _mm512_unpacklo_epi8(x[0], x[1]), y[1] = _mm512_unpacklo_epi8(x[2], x[3]);
        UNROLL for (int i = 0; i < N; i++)  // a lane has an element of rows t .. t + 3
            x[i] = quarters[i] & 1 ? _mm512_unpackhi_epi16(y[0], y[1]) : _mm512_unpacklo_epi16(y[0], y[1]);
        UNROLL for (int r = 0; r < T; r++)
            UNROLL for (int g = 0; g < DIGITS; g++) {
                const __m512i digits = four(w[r][g] + t);
                UNROLL for (int i = 0; i < N; i++) add_products(sums[r][i][g], digits, x[i]);
            }
    }
    UNROLL for (int r = 0; r < T; r++)
        UNROLL for (int i = 0; i < N; i++) {
            float found[W];
            store(found, number(sums[r][i]) * weights[r].step);
            for (int lane = 0; lane < lanes; lane++)
                for (int j = 0; j < 4; j++)
                    out[r * dim + d + 16 * lane + 4 * quarters[i] + j] += found[4 * lane + j];
        }
}
#endif

}  // namespace
