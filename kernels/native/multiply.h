// A product of float32 matrices that lie in a thread's caches: for the chunks of recurrent layers.
#pragma once
#include "rounding.h"

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 6, VECTORS = 4;  // of a tile of sums
#else
constexpr int ROWS = 4, VECTORS = 2;
#endif

// A tile of C = factor * C + A B; factor 0: C is not read.
template <int R, int V>
INLINE void tile(const float *a, long lda, const float *b, long ldb, float *c, long ldc, int depth, float factor) {
    Floats sums[R][V];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < V; j++)
            sums[r][j] = factor == 0 ? Floats{} : load(c + r * ldc + j * W) * factor;
    for (int i = 0; i < depth; i++, b += ldb) {
        Floats row[V];
        UNROLL for (int j = 0; j < V; j++) row[j] = load(b + j * W);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int j = 0; j < V; j++) sums[r][j] += row[j] * a[r * lda + i];
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < V; j++) store(c + r * ldc + j * W, sums[r][j]);
}

template <int V>
INLINE void columns(const float *a, long lda, const float *b, long ldb, float *c, long ldc, int rows, int depth,
                    float factor) {
    int r = 0;
    for (; r + ROWS <= rows; r += ROWS) tile<ROWS, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, factor);
    for (; r < rows; r++) tile<1, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, factor);
}

// C [rows, size] = factor * C + A [rows, depth] B [depth, size]; size is a multiple of W.
static void multiply(const float *a, long lda, const float *b, long ldb, float *c, long ldc, int rows, int size,
                     int depth, float factor) {
    int at = 0;
    for (; at + VECTORS * W <= size; at += VECTORS * W)
        columns<VECTORS>(a, lda, b + at, ldb, c + at, ldc, rows, depth, factor);
    for (; at < size; at += W) columns<1>(a, lda, b + at, ldb, c + at, ldc, rows, depth, factor);
}

}  // namespace
