// A product with weights of few bits in panels, as few_bits.cpp takes it.
#pragma once
#include <stdint.h>

namespace {

constexpr int LANES = 16;     // outputs of a panel
constexpr int TOGETHER = 64;  // products of one row that run at once, at most

struct Product {
    const void *x;                 // [rows][inputs]
    const int32_t *values;         // [panels][words][LANES]
    const void *scales, *offsets;  // [panels][groups][LANES]; offsets or NULL
    const void *bias, *residual;   // [outputs] and [rows][outputs, or half of them if gated], or NULL
    void *out;
    float *scratch;  // few rows: [rows][inputs, folds and outputs, rounded up]; many: x in tiles
    int rows, outputs, inputs, words, group, fold, bits, zero;
    int kind, scale_kind, bias_kind, out_kind, gated, threads;
};

// Floats of scratch that one row takes.
inline long few_floats(const Product &p) {
    const long padded = (p.words * (32 / p.bits) + LANES - 1) / LANES * LANES;
    return padded + (padded + p.fold - 1) / p.fold + (p.outputs + LANES - 1) / LANES * LANES;
}

}  // namespace
