// How many elements of a row the Hadamard transform mixes, and what it divides by
// (kernels/rows/transform_size.py).
#pragma once
#include <stdint.h>

extern "C" void omnikv_transform(const float *x, long rows, int dim, int run, double factor, int threads, float *out);

namespace {

constexpr int run_of(int dim) { return dim / 2 & -(dim / 2); }

constexpr int row_factor(int dim) {
    int factor = 1;
    for (int n = 2 * run_of(dim); n > 3; n >>= 2) factor *= 2;
    return factor;
}

constexpr int query_factor(int dim) { return 2 * run_of(dim) / row_factor(dim); }

}  // namespace
