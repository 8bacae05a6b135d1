// A step's token put into an index of K (kernels/index/learn.py): its K by channel, the codes of its parts,
// and its V in the sums of all V.
#include "learnt.h"
#include "rounding.h"

namespace {

// Elements are copied as they are.
template <class K>
void by_channel(const Learnt &c) {
    for (int h = 0; h < c.heads; h++)
        for (int i = 0; i < c.rows; i++) {
            const long channel = c.channels ? c.channels[(long)h * c.rows + i] : i;
            memcpy(c.index + h * c.index_head + i * c.index_row + (long)c.token * K::bytes,
                   c.row + h * c.row_head + channel * K::bytes, K::bytes);
        }
}

// engine/methods/select/index/value_sums.py: rows are added one after the other, in float64.
template <class V>
void add_value(const Learnt &c) {
    const int slot = c.token % c.block, number = c.token / c.block;
    for (int h = 0; h < c.heads; h++) {
        double *const prefix = c.prefix + h * c.prefix_head + (long)slot * c.dim;
        double *const before = c.blocks + h * c.block_head + (long)number * c.dim;
        for (int d = 0; d < c.dim; d += W) {
            const int count = c.dim - d < W ? c.dim - d : W;
            const Floats x = read_some<V>(c.row + h * c.row_head, d, count);
            for (int i = 0; i < count; i++) {
                double *const sum = prefix + d + i;
                *sum = slot ? x[i] + sum[-c.dim] : x[i];
                if (slot == c.block - 1) before[c.dim + d + i] = before[d + i] + *sum;
                c.mean[(long)h * c.dim + d + i] = (float)((before[d + i] + *sum) / (c.token + 1));
            }
        }
    }
}

// The nearest of `sums` centroids to k [width], of equal ones the first: that of the largest k c - c c / 2.
template <class K>
int nearest(const char *k, const float *centroids, int width, int sums) {
    int found = 0;
    float best = -INFINITY;
    for (int at = 0; at < sums; at += W) {
        const int count = sums - at < W ? sums - at : W;
        Floats parts[W] = {};
        for (int i = 0; i < count; i++)
            for (int d = 0; d < width; d += W) {
                const int some = width - d < W ? width - d : W;
                const Floats x = read_some<Float32>(centroids + (long)(at + i) * width, d, some);
                parts[i] += x * (read_some<K>(k, d, some) - x * .5f);
            }
        const Floats near = totals(parts);
        for (int i = 0; i < count; i++)
            if (near[i] > best) best = near[i], found = at + i;
    }
    return found;
}

template <class K>
void by_code(const Learnt &c) {
    const int width = c.dim / c.rows;
    for (int h = 0; h < c.heads; h++)
        for (int p = 0; p < c.rows; p++) {
            const char *k = c.row + h * c.row_head + (long)p * width * K::bytes;
            const float *centroids = c.centroids + h * c.centroid_head + p * c.centroid_part;
            uint8_t *const code = (uint8_t *)c.index + h * c.index_head + p * c.index_row + c.token;
            *code = (uint8_t)nearest<K>(k, centroids, width, c.sums);
        }
}

}  // namespace

// Return 0, or 1 for a kind that this build lacks.
extern "C" int omnikv_learn_channels(const Learnt *c) {
#define BY_CHANNEL(K) (by_channel<K>(*c), 0)
    OF_KIND(c->kind, BY_CHANNEL);
}

extern "C" int omnikv_add_value(const Learnt *c) {
#define ADD_VALUE(K) (add_value<K>(*c), 0)
    OF_KIND(c->kind, ADD_VALUE);
}

extern "C" int omnikv_learn_code(const Learnt *c) {
#define BY_CODE(K) (by_code<K>(*c), 0)
    OF_KIND(c->kind, BY_CODE);
}

extern "C" int omnikv_sizeof_learnt() { return sizeof(Learnt); }
