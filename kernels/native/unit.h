// A key or a query of a recurrent layer: divided by its length, times a factor, as float32. Returns what it
// was multiplied by.
#pragma once
#include <math.h>

#include "rounding.h"

namespace {

template <class K>
INLINE float unit(const char *row, int size, float eps, float factor, float *out) {
    Floats squares = {};
    for (int i = 0; i < size; i += W) {
        const Floats x = read_some<K>(row, i, size - i);
        squares += x * x;
    }
    const float scale = factor / sqrtf(total(squares) + eps);
    for (int i = 0; i < size; i += W)
        write_some<Float32>(out, i, size - i, read_some<K>(row, i, size - i) * scale);
    return scale;
}

}  // namespace
