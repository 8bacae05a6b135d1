// A product with weights of few bits in panels, as few_bits.cpp takes it.
#pragma once
#include <stdint.h>

namespace {

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

}  // namespace
