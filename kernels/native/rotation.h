// What one call of step.cpp is told that turns a decode step's q and k and stores its rows.
#pragma once
#include "norm.h"

namespace {

struct Rotation {
    char *qkv;               // [batch, queries, heads + 2 * kv_heads, dim]; heads are normed in place
    const float *cos, *sin;  // [batch, queries, pairs]
    char *out;               // [batch, queries, heads, dim]: rotated q
    char *k, *v;             // rows of the bank, [batch, kv_heads, rows, dim]; v NULL: V is K, and qkv has none
    long key_batch, key_head, key_row, value_batch, value_head, value_row;  // strides in bytes
    char *ring;                // [batch, slots, heads, dim]: q before rotation
    const int64_t *positions;  // [batch, queries]
    int batch, queries, heads, kv_heads, dim, pairs, slots;
    int first, count;  // the bank's rows are a ring of `count` from row `first` on, held twice; 0: no ring
    float eps;
    const char *q_norm, *k_norm;  // [dim] or NULL: what each head of q and k is normed and scaled by first
    Wide wide;
    int unit;  // whether each head of v is divided by its root mean square first
    int packed, key_bytes, value_bytes;  // the bank's rows are of this kind of few bits, so many bytes each; 0: floats
};

}  // namespace
