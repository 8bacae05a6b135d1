// A product of float32 matrices that lie in a thread's caches: for the chunks of recurrent layers.
#pragma once
#include "rounding.h"

namespace {

// A tile of sums. Of the second factor it takes a strip of 2 or 4 vectors, which stays in the first cache for
// all rows: 128 rows of a strip are 16 KB.
#if defined(__AVX512F__)
constexpr int ROWS = 12, VECTORS = 2;
#elif defined(__ARM_NEON)
constexpr int ROWS = 6, VECTORS = 4;
#else
constexpr int ROWS = 6, VECTORS = 2;
#endif

// The first factor: element (r, i) lies r * row + i * column floats on.
struct Left {
    const float *at;
    long row, column;
};

// sum + a b. PAIRS: of both halves of their elements, which are bfloat16.
template <bool PAIRS>
INLINE Floats add(Floats sum, Floats a, Floats b) {
#if defined(HAS_PAIRS)
    if (PAIRS) return add_pairs(sum, a, b);
#endif
    return sum + a * b;
}

// A tile of C = factor * C + A B; factor 0: C is not read.
template <int R, int V, bool PAIRS>
INLINE void tile(const float *a, long row, long column, const float *b, long ldb, float *c, long ldc, int depth,
                 float factor) {
    Floats sums[R][V];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < V; j++)
            sums[r][j] = factor == 0 ? Floats{} : load(c + r * ldc + j * W) * factor;
    for (int i = 0; i < depth; i++, a += column, b += ldb) {
        Floats one[V];
        UNROLL for (int j = 0; j < V; j++) one[j] = load(b + j * W);
        UNROLL for (int r = 0; r < R; r++) {
            const Floats x = all(a[r * row]);
            UNROLL for (int j = 0; j < V; j++) sums[r][j] = add<PAIRS>(sums[r][j], x, one[j]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < V; j++) store(c + r * ldc + j * W, sums[r][j]);
}

template <int V, bool PAIRS>
INLINE void strip(Left a, const float *b, long ldb, float *c, long ldc, int rows, int depth, float factor,
                  bool lower) {
    int r = 0;
    for (; r + ROWS <= rows; r += ROWS) {
        const int some = lower && r + ROWS < depth ? r + ROWS : depth;
        tile<ROWS, V, PAIRS>(a.at + r * a.row, a.row, a.column, b, ldb, c + r * ldc, ldc, some, factor);
    }
    for (; r + 4 <= rows; r += 4) {
        const int some = lower && r + 4 < depth ? r + 4 : depth;
        tile<4, V, PAIRS>(a.at + r * a.row, a.row, a.column, b, ldb, c + r * ldc, ldc, some, factor);
    }
    for (; r < rows; r++) {
        const int some = lower && r + 1 < depth ? r + 1 : depth;
        tile<1, V, PAIRS>(a.at + r * a.row, a.row, a.column, b, ldb, c + r * ldc, ldc, some, factor);
    }
}

// C [rows, size] = factor * C + A [rows, depth] B [depth, size]; size is a multiple of W. lower: A is 0
// above its diagonal.
template <bool PAIRS = false>
static void multiply(Left a, const float *b, long ldb, float *c, long ldc, int rows, int size, int depth,
                     float factor, bool lower = false) {
    int at = 0;
    for (; at + VECTORS * W <= size; at += VECTORS * W)
        strip<VECTORS, PAIRS>(a, b + at, ldb, c + at, ldc, rows, depth, factor, lower);
    for (; at < size; at += W) strip<1, PAIRS>(a, b + at, ldb, c + at, ldc, rows, depth, factor, lower);
}

// A B^T up to the diagonal and the rest of its vector, in whole tiles: C [size, ld]. Rows of A and B [size,
// depth] follow each other, and B lies across: [depth, ld].
template <bool PAIRS = false>
static void among(const float *a, const float *across, long ld, float *c, int size, int depth) {
    for (int at = 0; at < size; at += VECTORS * W) {
        const int wide = (size - at + W - 1) / W * W;
        const int some = wide < VECTORS * W ? wide : VECTORS * W;
        const Left rest = {a + (long)at * depth, depth, 1};
        multiply<PAIRS>(rest, across + at, ld, c + at * ld + at, ld, size - at, some, depth, 0);
    }
}

// Rows [size, depth] across: [depth, ld], with zeros from `size` to a multiple of W.
static void turn_across(const float *rows, int size, int depth, float *across, long ld) {
    constexpr int SIDE = 8;
    const int wide = (size + W - 1) / W * W;
    for (int i = 0; i < wide; i += SIDE)
        for (int d = 0; d < depth; d += SIDE)
            for (int x = d; x < d + SIDE && x < depth; x++)
                UNROLL for (int y = 0; y < SIDE; y++)
                    across[x * ld + i + y] = i + y < size ? rows[(long)(i + y) * depth + x] : 0;
}

}  // namespace
