// Rows of bfloat16 multiplied in pairs, two products an element of a vector: with AVX512-BF16 half
// the instructions of float32, and none to convert. Sums are float32.
#pragma once
#include "vector.h"

namespace {

#if defined(__AVX512BF16__)
INLINE __m512bh thirty_two(const void *from) { return (__m512bh)_mm512_loadu_si512(from); }

// T queries as bfloat16; false where one is no such number: rounding it would move its logits.
template <int T>
INLINE bool narrowed(const float *q, int dim, uint16_t *to) {
    Ints lost = {};
    for (int i = 0; i < T * dim; i += W) {
        const Ints bits = *(const Ints *)(q + i);
        lost |= bits & 0xffff;
        *(Halves *)(to + i) = __builtin_convertvector((bits >> 16) & 0xffff, Halves);
    }
    for (int i = 0; i < W; i++)
        if (lost[i]) return false;
    return true;
}

// Products of T queries q [T][dim] with `rows`, dim in 32s: l [T][apart].
template <int T>
INLINE void pair_logits(const uint16_t *q, const char *const *rows, int ahead, int count, int dim, float *l,
                        int apart) {
    for (int t = 0; t < count; t += W) {
        Floats sums[T][W] = {};
        for (int i = 0; i < W && t + i < count; i++) {
            fetch(rows[t + i + ahead], 2 * dim);
            __m512 s[T];
            for (int r = 0; r < T; r++) s[r] = _mm512_setzero_ps();
            for (int d = 0; d < dim; d += 32) {
                const __m512bh x = thirty_two(rows[t + i] + 2 * d);
                for (int r = 0; r < T; r++) s[r] = _mm512_dpbf16_ps(s[r], x, thirty_two(q + r * dim + d));
            }
            for (int r = 0; r < T; r++) sums[r][i] = (Floats)s[r];
        }
        for (int r = 0; r < T; r++) store(l + r * apart + t, totals(sums[r]));
    }
}

// Adds pairs of weights [T][apart / 2] times the values `rows` to columns d .. d + 32 C - 1 of out.
// A row's elements meet those of the next: unpacked, the columns of a vector lie in another order,
// which the sums are freed of at the end.
template <int T, int C>
INLINE void add_pair_columns(const uint32_t *weights, int apart, const char *const *rows, int ahead, int count,
                             int dim, int d, float *out) {
    __m512 s[T][2 * C];
    for (int r = 0; r < T; r++)
        for (int c = 0; c < 2 * C; c++) s[r][c] = _mm512_setzero_ps();
    for (int t = 0; t < count; t += 2) {
        fetch(rows[t + ahead] + 2 * d, 64 * C);
        fetch(rows[t + 1 + ahead] + 2 * d, 64 * C);
        __m512bh x[2 * C];
        for (int c = 0; c < C; c++) {
            const __m512i one = _mm512_loadu_si512(rows[t] + 2 * (d + 32 * c));
            const __m512i two = _mm512_loadu_si512(rows[t + 1] + 2 * (d + 32 * c));
            x[2 * c] = (__m512bh)_mm512_unpacklo_epi16(one, two);
            x[2 * c + 1] = (__m512bh)_mm512_unpackhi_epi16(one, two);
        }
        for (int r = 0; r < T; r++) {
            const __m512bh w = (__m512bh)_mm512_set1_epi32(weights[r * (apart / 2) + t / 2]);
            for (int c = 0; c < 2 * C; c++) s[r][c] = _mm512_dpbf16_ps(s[r][c], w, x[c]);
        }
    }
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int r = 0; r < T; r++)
        for (int c = 0; c < C; c++) {
            float *at = out + r * dim + d + 32 * c;
            store(at, load(at) + (Floats)_mm512_permutex2var_ps(s[r][2 * c], first, s[r][2 * c + 1]));
            store(at + 16, load(at + 16) + (Floats)_mm512_permutex2var_ps(s[r][2 * c], second, s[r][2 * c + 1]));
        }
}

// Adds weights l [T][apart], zeros behind `count`, times the values `rows` to out [T][dim].
template <int T, int apart>
INLINE void add_pair_values(const float *l, const char *const *rows, int ahead, int count, int dim, float *out) {
    alignas(64) uint32_t weights[T][apart / 2];
    for (int r = 0; r < T; r++)
        for (int i = 0; i < count; i += W) {
            const __m256bh narrow = _mm512_cvtneps_pbh((__m512)load(l + r * apart + i));
            memcpy((uint16_t *)weights[r] + i, &narrow, sizeof narrow);
        }
    constexpr int C = T <= 4 ? 2 : 1;
    int d = 0;
    for (; d + 32 * C <= dim; d += 32 * C)
        add_pair_columns<T, C>(weights[0], apart, rows, ahead, count, dim, d, out);
    for (; d < dim; d += 32) add_pair_columns<T, 1>(weights[0], apart, rows, ahead, count, dim, d, out);
}
#endif

}  // namespace
