// What the kernels of a prompt's attention share: a call, the softmax of a row's logits of one block of
// keys, and what a row ends in.
#pragma once
#include "rounding.h"
#include "whole.h"

namespace {

constexpr int NEAR = 256;    // rows of a block of keys
constexpr int UNIT = 480;    // queries x group of one unit of work: they share a block's packing
constexpr int WIDEST = 256;  // the widest head whose sums of whole numbers stay below 2^31

struct Call {
    const char *q, *k, *v;
    long query, query_head;  // strides of q in elements: from a query to the next, from head to head
    long key_head, key_row, value_head, value_row;  // strides in bytes
    const int32_t *index;                           // or NULL; strides in elements
    long index_head;
    char *out;   // [queries][heads][dim], of kind out_kind
    float *lse;  // [queries][heads]
    int kv_heads, group, dim, queries, kept, start, visited;
    // query c sees visited rows from low + c (none of the chosen ones is ever below) to high + c
    int causal, high, window;
    int threads, exact;  // exact: rows of 8 bits meet queries and weights of float32
    int query_bits;      // 8: queries may be numbers of 8 bits where rows are, exact or not
    float scale, cap;
    int out_kind;
};

struct Rows {  // of a thread's unit, and the scales of its block of keys
    float *out, *best, *sum, *query_scale, *key_scale, *value_scale;
    float value_step;  // of weights that are whole numbers, where a row's largest is 1
    long wide;         // floats of a row of out
};

struct Span {  // low .. high - 1, of a block
    int low, high;
};

// The rows of a block of `count` from visited row t on that a query sees.
INLINE Span seen_of(const Call &c, int query, int t, int count) {
    int high = c.causal ? c.high + query + 1 - t : count, low = 0;
    high = high < count ? high : count, high = high > 0 ? high : 0;
    if (c.window) low = c.high + query + 1 - c.window - t;
    low = low > 0 ? low : 0, low = low < NEAR ? low : NEAR;
    if (low < c.kept - t) low = 0;  // chosen rows are seen by all
    return {low, high};
}

// Visited rows first .. last - 1 are those that queries of this range see.
INLINE Span visited_of(const Call &c, int first, int last) {
    Span all = {0, c.causal && c.high + last < c.visited ? c.high + last : c.visited};
    if (c.window && !c.kept && c.high + first + 1 > c.window)
        all.low = (c.high + first + 1 - c.window) / NEAR * NEAR;
    return all;
}

// Where visited row t lies in K and V.
INLINE long row_of(const Call &c, int head, int t) {
    return t < c.kept ? (long)c.index[head * c.index_head + t] : (long)c.start + t - c.kept;
}

#if defined(__AVX2__)
// A block's scales of values, as whole numbers are multiplied by them.
INLINE void in_steps(Rows &w) {
    const float top = reach_of(w.value_scale, NEAR);
    w.value_step = top > 0 ? top / LARGEST : top;
    for (int i = 0; i < NEAR; i++) w.value_scale[i] *= top > 0 ? LARGEST / top : 0;
}
#endif

// The largest and the sum of a vector, by halves: in turn each lane would wait for the one before.
INLINE float highest(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    return largest(x);
#endif
}

INLINE float added_up(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    return total(x);
#endif
}

// exp(x * unit - from), by powers of two where a machine has the two operations that they take: 2^r on
// |r| <= 1/2 by a polynomial of degree 6 (Cephes, exp2f.c), to 2 units in the last place; 0 at -inf.
// SHORT: of degree 4, to 2^-18 of it, for weights that become whole numbers of 16 bits.
template <bool SHORT>
struct Exponential {
    float unit, from;
#if defined(__AVX512F__)
    Exponential(float unit, float from) : unit(unit * 1.44269504f), from(from * 1.44269504f) {
        // up by three roundings: a weight above 1 would be no whole number of 16 bits
        if (SHORT) this->from += fabsf(this->from) * 0x1p-22f;
    }
    Floats operator()(Floats x) const {
        const __m512 power = (__m512)(x * unit - from);
        const Floats r = (Floats)_mm512_reduce_ps(power, 0), whole = (Floats)power - r;
        Floats p;
        if (SHORT) {
            p = all(9.582853236e-3f) * r + 5.590642594e-2f;
            p = p * r + 2.402409862e-1f;
            p = p * r + 6.931241933e-1f;
        } else {
            p = all(1.535336188e-4f);
            p = p * r + 1.339887440e-3f;
            p = p * r + 9.618437358e-3f;
            p = p * r + 5.550332471e-2f;
            p = p * r + 2.402264791e-1f;
            p = p * r + 6.931472029e-1f;
        }
        return (Floats)_mm512_scalef_ps((__m512)(p * r + 1), (__m512)whole);
    }
#else
    Exponential(float unit, float from) : unit(unit), from(from) {}
    Floats operator()(Floats x) const { return exponential(x * unit - from); }
#endif
};

// Not inlined, so that all who call it get the same bits.
static __attribute__((noinline)) Floats exponentials(Floats x) { return exponential(x); }

// How a row's logits of one block become weights: exp(x * unit - from), which count exp(behind) of what they
// say. less: what is left of the row's sums so far.
struct Fading {
    float unit, from, behind, less;
};

// Of a row's logits x, of which the largest are `top`; what it does not see becomes -inf.
template <class M>
INLINE Fading measured(const Call &c, Rows &w, float *x, Floats top, Span seen, int at) {
    const int low = seen.low, high = seen.high;
    // products are multiplied by the scale as they become weights, unless a cap comes between
    const float scale = c.scale * w.query_scale[at], unit = scale > 0 && !c.cap ? scale : 1;
    if (!(scale > 0) || c.cap) {
        top = all(-INFINITY);
        for (int i = 0; i < NEAR; i += W) {
            const Floats y = load(x + i) * scale;
            store(x + i, c.cap ? capped(y, c.cap) : y);
            top = most(top, load(x + i));
        }
    }
    if (low > 0 || high < NEAR) {
        top = all(-INFINITY);
        for (int i = 0; i < low; i++) x[i] = -INFINITY;
        for (int i = high; i < NEAR; i++) x[i] = -INFINITY;
        for (int i = 0; i < NEAR; i += W) top = most(top, load(x + i));
    }
    const float here = highest(top) * unit, best = w.best[at], now = here > best ? here : best;
    const float base = now == -INFINITY ? 0 : now;
    // whole numbers reach as far as they can in every block
    const float from = M::whole && here > -INFINITY ? here : base;
    w.best[at] = now;
    return {unit, from, from - base, best == now ? 1 : expf(best - base)};
}

// Weights of the row's logits, with its new sum; share: exp(behind). Returns their scale.
template <class M, class X>
INLINE float soften(Rows &w, const float *x, const Fading &fading, float share, int at, typename M::Element *to) {
    const Exponential<M::whole> weight(fading.unit, fading.from);
    const float less = fading.less;
    Floats added = {};
    for (int i = 0; i < NEAR; i += 2 * W) {
        const Floats one = weight(load(x + i)), two = weight(load(x + i + W));
        added += one;
        added += two;
        if (X::scaled) M::keep(one, two, load(w.value_scale + i), load(w.value_scale + i + W), to, i);
        else M::keep(one, two, all(1), all(1), to, i);
    }
    w.sum[at] = w.sum[at] * less + added_up(added) * share;
    if (less != 1)
        for (long d = 0; d < w.wide; d += W) store(w.out + at * w.wide + d, load(w.out + at * w.wide + d) * less);
    return M::whole ? share * w.value_step : 1;
}

// Write what the rows of queries from `first` on ended in.
template <class K>
INLINE void give_as(const Call &c, const Rows &w, int head, int first, int rows) {
    for (int r = 0; r < rows; r++) {
        const long place = (long)(first + r / c.group) * c.kv_heads * c.group + head * c.group + r % c.group;
        const float sum = w.sum[r];
        for (int d = 0; d < c.dim; d += W) {
            const Floats found = sum > 0 || sum != sum ? load(w.out + r * w.wide + d) / sum : Floats{};
            write_some<K>(c.out, place * c.dim + d, c.dim - d, found);
        }
        c.lse[place] = w.best[r] + logf(sum);
    }
}

INLINE void give(const Call &c, const Rows &w, int head, int first, int rows) {
    if (c.out_kind == BFLOAT16) return give_as<BFloat16>(c, w, head, first, rows);
#if defined(HAS_FLOAT16)
    if (c.out_kind == FLOAT16) return give_as<Float16>(c, w, head, first, rows);
#endif
    give_as<Float32>(c, w, head, first, rows);
}

}  // namespace
