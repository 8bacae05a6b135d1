// RMSNorm of a row (arXiv 1910.07467): x * rsqrt(mean(x^2) + eps) in float32, rounded, times the weight,
// rounded. A wide norm adds an offset to its weight and rounds once, behind it.
#pragma once
#include "rounding.h"

namespace {

struct Wide {
    int norm;      // whether norms are wide
    float offset;  // of their weights
};

template <class K>
INLINE float norm_scale(const char *row, int size, float eps) {
    Floats squares[2] = {};
    for (int i = 0; i < size; i += W) {
        const Floats x = read_some<K>(row, i, size - i);
        squares[i / W % 2] += x * x;
    }
    return 1 / sqrtf(total(squares[0] + squares[1]) / size + eps);
}

// Elements i .. of a row, at most `count` of them.
template <class K>
INLINE Floats normed(const char *row, const char *weight, int i, int count, float scale, Wide wide) {
    const Floats x = read_some<K>(row, i, count) * scale;
    if (wide.norm) return Kept<K>::rounded(x * (read_some<K>(weight, i, count) + wide.offset));
    return Kept<K>::rounded(Kept<K>::rounded(x) * read_some<K>(weight, i, count));
}

}  // namespace
