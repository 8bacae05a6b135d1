// What the chunks of recurrent layers share: CHUNK tokens whose products are taken together.
#pragma once
#include "multiply.h"

namespace {

constexpr int CHUNK = 32;  // 64 take 1.09 of the time: products of tokens with each other grow with it

// What token i is left of tokens j .. j + W - 1 by decays that sum to `passed`; of those after it, nothing.
// Differences of sums in float64 keep float32's precision.
INLINE Floats left_of(const double *passed, int i, int j) {
    float since[W];
    for (int n = 0; n < W; n++) since[n] = (float)(passed[i] - passed[j + n]);
    for (int n = i + 1 - j; n < W; n++) since[n] = -INFINITY;
    return exponential(load(since));
}

// A row of products among tokens, its first i + 1 known, times what is left and `factor`: CHUNK weights.
INLINE void weigh(const float *products, const double *passed, int i, float factor, float *weights) {
    for (int j = 0; j < CHUNK; j += W) {
        const Floats left = j <= i ? left_of(passed, i, j) : Floats{};
        // no product with a token after it counts, whatever it is
        store(weights + j, left > 0 ? load(products + j) * left * factor : Floats{});
    }
}

}  // namespace
