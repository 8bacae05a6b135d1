// A row of floats turned as rotary positions turn it.
#pragma once
#include "vector.h"

namespace {

// The pairs (i, i + pairs) of a row; what lies behind them stays.
INLINE void turn_pairs(const float *cos, const float *sin, int pairs, float *row) {
    int p = 0;
    for (; p + W <= pairs; p += W) {
        const Floats one = load(row + p), other = load(row + pairs + p), c = load(cos + p), s = load(sin + p);
        store(row + p, one * c - other * s), store(row + pairs + p, other * c + one * s);
    }
    for (; p < pairs; p++) {
        const float one = row[p], other = row[pairs + p];
        row[p] = one * cos[p] - other * sin[p], row[pairs + p] = other * cos[p] + one * sin[p];
    }
}

}  // namespace
