// What int8.h does with AVX512-VNNI, with ARM's products of four signed bytes and their sum: a float is a
// number of 24 bits in three digits of 8 bits, all of which have a sign.
#pragma once
#include "int8.h"

namespace {

#if defined(__ARM_NEON) && defined(HAS_INTEGERS)
constexpr int DIGITS = 3;
constexpr float UNIT = 8323072;  // the largest number: 127 << 16

// Digits of floats [COUNT] and what the last of them weighs.
template <int COUNT>
struct Digits {
    alignas(16) int8_t of[DIGITS][COUNT];
    float step;

    // Returns false for floats that are not finite, or too small for a reciprocal. count: a multiple of W.
    bool set(const float *x, int count) {
        Floats top = {}, sum = {};
        for (int i = 0; i < count; i += W) {
            const Floats size = (Floats)vabsq_f32((float32x4_t)load(x + i));
            top = most(top, size), sum += size;
        }
        const float reach = largest(top);
        if (!(total(sum) < INFINITY) || (reach < 1e-30f && reach > 0)) return false;
        step = reach / UNIT;
        const float inverse = reach > 0 ? UNIT / reach : 0;
        for (int i = 0; i < count; i += W) {
            int32x4_t left = vcvtnq_s32_f32((float32x4_t)(load(x + i) * inverse));
            for (int g = DIGITS; g--;) {  // the last digit first; each is at least -128
                const int32x4_t digit = vshrq_n_s32(vshlq_n_s32(left, 24), 24);
                const int16x4_t narrow = vmovn_s32(digit);
                const int8x8_t bytes = vmovn_s16(vcombine_s16(narrow, narrow));
                memcpy(of[g] + i, &bytes, W);
                left = vshrq_n_s32(vsubq_s32(left, digit), 8);
            }
        }
        for (int i = count; i % 16; i++)
            for (int g = 0; g < DIGITS; g++) of[g][i] = 0;
        return true;
    }
};

INLINE int8x16_t sixteen(const void *p) { return vld1q_s8((const int8_t *)p); }

// The three sums of digits as one float, in units of the last.
INLINE Floats number(const int32x4_t *sums) {
    const int32x4_t low = vaddq_s32(vshlq_n_s32(sums[1], 8), sums[2]);
    return (Floats)vcvtq_f32_s32(sums[0]) * 65536.f + (Floats)vcvtq_f32_s32(low);
}

// Products of T queries, 2 at most, with four rows: l [T][stride].
template <int T>
INLINE void four_logits(const Digits<WIDEST> *q, const char *const *rows, int dim, float *l, int stride) {
    int32x4_t sums[T][DIGITS][4] = {};
    for (int d = 0; d < dim; d += 16) {
        int8x16_t x[4];
        UNROLL for (int i = 0; i < 4; i++) x[i] = sixteen(rows[i] + d);
        UNROLL for (int r = 0; r < T; r++)
            UNROLL for (int g = 0; g < DIGITS; g++) {
                const int8x16_t digits = sixteen(q[r].of[g] + d);
                UNROLL for (int i = 0; i < 4; i++) sums[r][g][i] = vdotq_s32(sums[r][g][i], x[i], digits);
            }
    }
    for (int r = 0; r < T; r++) {
        int32x4_t whole[DIGITS];
        for (int g = 0; g < DIGITS; g++) {
            const int32x4_t *s = sums[r][g];
            whole[g] = vpaddq_s32(vpaddq_s32(s[0], s[1]), vpaddq_s32(s[2], s[3]));
        }
        store(l + r * stride, number(whole) * q[r].step);
    }
}

// Products of T queries [T][dim] with `rows`, whose list goes on for `ahead` behind `count` and what follows
// up to a multiple of four: l [T][stride]. Returns false where a query is no such number.
template <int T>
INLINE bool whole_logits(const float *q, const char *const *rows, int ahead, const char *const *values,
                         int count, int dim, float *l, int stride) {
    Digits<WIDEST> digits[T];
    for (int r = 0; r < T; r++)
        if (dim > WIDEST || dim % 16 || !digits[r].set(q + r * dim, dim)) return false;
    for (int t = 0; t < count; t += 4) {
        for (int i = 0; i < 4; i++) fetch(rows[t + i + ahead], dim + 4), fetch(values[t + i], dim + 4);
        int r = 0;
        for (; r + 2 <= T; r += 2) four_logits<2>(digits + r, rows + t, dim, l + r * stride + t, stride);
        for (; r < T; r++) four_logits<1>(digits + r, rows + t, dim, l + r * stride + t, stride);
    }
    return true;
}

// Adds weights, of T queries, 2 at most, times the values `rows` to 16 columns of out [T][dim].
template <int T, int ROWS>
INLINE void add_sixteen(const Digits<ROWS> *w, const char *const *rows, int count, int dim, int d, float *out) {
    int32x4_t sums[T][4][DIGITS] = {};
    for (int t = 0; t < count; t += 4) {
        int8x16_t x[4];
        UNROLL for (int i = 0; i < 4; i++) x[i] = sixteen(rows[t + i] + d);
        const int16x8_t one = vreinterpretq_s16_s8(vzip1q_s8(x[0], x[1]));
        const int16x8_t two = vreinterpretq_s16_s8(vzip1q_s8(x[2], x[3]));
        const int16x8_t three = vreinterpretq_s16_s8(vzip2q_s8(x[0], x[1]));
        const int16x8_t four = vreinterpretq_s16_s8(vzip2q_s8(x[2], x[3]));
        // a lane has an element of rows t .. t + 3
        x[0] = vreinterpretq_s8_s16(vzip1q_s16(one, two)), x[1] = vreinterpretq_s8_s16(vzip2q_s16(one, two));
        x[2] = vreinterpretq_s8_s16(vzip1q_s16(three, four)), x[3] = vreinterpretq_s8_s16(vzip2q_s16(three, four));
        UNROLL for (int r = 0; r < T; r++)
            UNROLL for (int g = 0; g < DIGITS; g++) {
                int32_t quad;
                memcpy(&quad, w[r].of[g] + t, sizeof quad);
                const int8x16_t digits = vreinterpretq_s8_s32(vdupq_n_s32(quad));
                UNROLL for (int i = 0; i < 4; i++) sums[r][i][g] = vdotq_s32(sums[r][i][g], x[i], digits);
            }
    }
    for (int r = 0; r < T; r++)
        for (int i = 0; i < 4; i++) {
            float *at = out + r * dim + d + i * W;
            store(at, load(at) + number(sums[r][i]) * w[r].step);
        }
}

// Adds weights l [T][ROWS], zeros behind `count` up to a multiple of four, times the values `rows` to out
// [T][dim]. Returns false where a weight is no such number.
template <int T, int ROWS>
INLINE bool add_whole_values(const float *l, const char *const *rows, int count, int dim, float *out) {
    Digits<ROWS> weights[T];
    for (int r = 0; r < T; r++)
        if (dim % 16 || !weights[r].set(l + r * ROWS, (count + W - 1) / W * W)) return false;
    for (int d = 0; d < dim; d += 16) {
        int r = 0;
        for (; r + 2 <= T; r += 2) add_sixteen<2, ROWS>(weights + r, rows, count, dim, d, out + r * dim);
        for (; r < T; r++) add_sixteen<1, ROWS>(weights + r, rows, count, dim, d, out + r * dim);
    }
    return true;
}
#endif

}  // namespace
