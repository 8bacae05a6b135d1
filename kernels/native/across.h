// Squares of 32-bit numbers laid across: rows become columns, in registers.
#pragma once
#include "vector.h"

namespace {

// W vectors: element j of vector i and element i of vector j change places.
INLINE void turn_square(Floats (&a)[W]) {
#if defined(__AVX512F__)
    __m512i x[16], y[16];
    UNROLL for (int i = 0; i < 16; i++) x[i] = (__m512i)a[i];
    UNROLL for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]), x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]), x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    // quarter q of x[4 i + j]: column 4 q + j of rows 4 i .. 4 i + 3
    UNROLL for (int j = 0; j < 4; j++) {
        const __m512i even[2] = {_mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88)};
        const __m512i odd[2] = {_mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd), _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd)};
        a[j] = (Floats)_mm512_shuffle_i32x4(even[0], even[1], 0x88);
        a[4 + j] = (Floats)_mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
        a[8 + j] = (Floats)_mm512_shuffle_i32x4(even[0], even[1], 0xdd);
        a[12 + j] = (Floats)_mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
    }
#elif defined(__AVX2__)
    __m256 x[8], y[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        x[i] = _mm256_unpacklo_ps((__m256)a[i], (__m256)a[i + 1]);
        x[i + 1] = _mm256_unpackhi_ps((__m256)a[i], (__m256)a[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        y[i] = _mm256_shuffle_ps(x[i], x[i + 2], 0x44), y[i + 1] = _mm256_shuffle_ps(x[i], x[i + 2], 0xee);
        y[i + 2] = _mm256_shuffle_ps(x[i + 1], x[i + 3], 0x44), y[i + 3] = _mm256_shuffle_ps(x[i + 1], x[i + 3], 0xee);
    }
    UNROLL for (int j = 0; j < 4; j++) {
        a[j] = (Floats)_mm256_permute2f128_ps(y[j], y[4 + j], 0x20);
        a[4 + j] = (Floats)_mm256_permute2f128_ps(y[j], y[4 + j], 0x31);
    }
#elif defined(__ARM_NEON)
    const float32x4_t one = vtrn1q_f32((float32x4_t)a[0], (float32x4_t)a[1]);
    const float32x4_t two = vtrn2q_f32((float32x4_t)a[0], (float32x4_t)a[1]);
    const float32x4_t three = vtrn1q_f32((float32x4_t)a[2], (float32x4_t)a[3]);
    const float32x4_t four = vtrn2q_f32((float32x4_t)a[2], (float32x4_t)a[3]);
    a[0] = (Floats)vcombine_f32(vget_low_f32(one), vget_low_f32(three));
    a[1] = (Floats)vcombine_f32(vget_low_f32(two), vget_low_f32(four));
    a[2] = (Floats)vcombine_f32(vget_high_f32(one), vget_high_f32(three));
    a[3] = (Floats)vcombine_f32(vget_high_f32(two), vget_high_f32(four));
#else
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            const float held = a[i][j];
            a[i][j] = a[j][i], a[j][i] = held;
        }
#endif
}

}  // namespace
