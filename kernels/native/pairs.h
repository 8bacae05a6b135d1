// Rows of bfloat16 multiplied in pairs, two products an element of a vector: with AVX512-BF16 or ARM's
// BFDOT half the instructions of float32, and none to convert. Sums are float32.
#pragma once
#include "vector.h"

namespace {

#if defined(HAS_PAIRS)
INLINE Floats paired(const void *from) { return load((const float *)from); }  // 2 W elements

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

// Products of T queries q [T][dim] with `rows`, dim in 2 Ws: l [T][apart]. later: a row to fetch for each of them.
// D: dim, or 0. Sums of four rows are in registers at a time and leave them as halves of totals.
template <int T, int D, class L>
INLINE void pair_logits_of(const uint16_t *q, const char *const *rows, L later, int count, int dim,
                           float *l, int apart) {
    constexpr int N = T < 4 ? T : 4;
    if (D) dim = D;
    for (int t = 0; t < count; t += W)
        for (int r = 0; r < T; r += N) {
            Floats halves[N][W / 4];
            UNROLL for (int i = 0; i < W / 4; i++) {
                const char *const *own = rows + t + 4 * i;
                // as many lines of a row beside each part of the queries
                UNROLL for (int j = 0; j < 4; j++) fetch(later[t + 4 * i + j] + 2 * dim / T * r, 2 * dim / T * N);
                Floats s[N][4] = {};
                UNROLL for (int d = 0; d < dim; d += 2 * W)
                    UNROLL for (int j = 0; j < 4; j++) {
                        const Floats x = paired(own[j] + 2 * d);
                        UNROLL for (int n = 0; n < N; n++)
                            s[n][j] = add_pairs(s[n][j], x, paired(q + (r + n) * dim + d));
                    }
                UNROLL for (int n = 0; n < N; n++) halves[n][i] = four_totals(s[n]);
            }
            UNROLL for (int n = 0; n < N; n++) store(l + (r + n) * apart + t, join_totals(halves[n]));
        }
}

template <int T, class L>
INLINE void pair_logits(const uint16_t *q, const char *const *rows, L later, int count, int dim,
                        float *l, int apart) {
    if (dim == 64) pair_logits_of<T, 64>(q, rows, later, count, dim, l, apart);
    else if (dim == 128) pair_logits_of<T, 128>(q, rows, later, count, dim, l, apart);
    else pair_logits_of<T, 0>(q, rows, later, count, dim, l, apart);
}

// Rows one and two, 2 W elements of each: low and high get pairs of an element of both. On x86 the columns
// of a vector lie in another order then.
INLINE void put_together(const char *one, const char *two, Floats &low, Floats &high) {
#if defined(__ARM_NEON)
    const uint16x8_t x = (uint16x8_t)paired(one), y = (uint16x8_t)paired(two);
    low = (Floats)vzip1q_u16(x, y), high = (Floats)vzip2q_u16(x, y);
#else
    const __m512i x = _mm512_loadu_si512(one), y = _mm512_loadu_si512(two);
    low = (Floats)_mm512_unpacklo_epi16(x, y), high = (Floats)_mm512_unpackhi_epi16(x, y);
#endif
}

// Adds sums of what `put_together` gave to 2 W columns.
INLINE void add_together(Floats low, Floats high, float *at) {
#if !defined(__ARM_NEON)
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const Floats held = (Floats)_mm512_permutex2var_ps((__m512)low, first, (__m512)high);
    high = (Floats)_mm512_permutex2var_ps((__m512)low, second, (__m512)high), low = held;
#endif
    store(at, load(at) + low), store(at + W, load(at + W) + high);
}

// Adds pairs of weights [T][apart / 2] times the values `rows` to columns d .. d + 2 W C - 1 of out: a row's
// elements meet those of the next.
template <int T, int C, class L>
INLINE void add_pair_columns(const uint32_t *weights, int apart, const char *const *rows, L later,
                             int count, int dim, int d, float *out) {
    Floats s[T][2 * C] = {};
    for (int t = 0; t < count; t += 2) {
        fetch(later[t] + 2 * d, 4 * W * C);
        fetch(later[t + 1] + 2 * d, 4 * W * C);
        Floats x[2 * C];
        for (int c = 0; c < C; c++) {
            const long at = 2 * (d + 2 * W * c);
            put_together(rows[t] + at, rows[t + 1] + at, x[2 * c], x[2 * c + 1]);
        }
        for (int r = 0; r < T; r++) {
            const Floats w = (Floats)(Ints{} + (int32_t)weights[r * (apart / 2) + t / 2]);
            for (int c = 0; c < 2 * C; c++) s[r][c] = add_pairs(s[r][c], w, x[c]);
        }
    }
    for (int r = 0; r < T; r++)
        for (int c = 0; c < C; c++)
            add_together(s[r][2 * c], s[r][2 * c + 1], out + r * dim + d + 2 * W * c);
}

// Adds weights l [T][apart], zeros behind `count`, times the values `rows` to out [T][dim].
template <int T, int apart, class L>
INLINE void add_pair_values(const float *l, const char *const *rows, L later, int count, int dim,
                            float *out) {
    alignas(64) uint32_t weights[T][apart / 2];
    for (int r = 0; r < T; r++)
        for (int i = 0; i < count; i += W)
            *(Halves *)((uint16_t *)weights[r] + i) = narrow_halves(load(l + r * apart + i));
    constexpr int C = W == 4 && T <= 2 ? 4 : T <= 4 ? 2 : 1;
    int d = 0;
    for (; d + 2 * W * C <= dim; d += 2 * W * C)
        add_pair_columns<T, C>(weights[0], apart, rows, later, count, dim, d, out);
    for (; d < dim; d += 2 * W) add_pair_columns<T, 1>(weights[0], apart, rows, later, count, dim, d, out);
}
#endif

}  // namespace
