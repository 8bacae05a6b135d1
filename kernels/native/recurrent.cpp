// A decode step of a gated delta net: the delta rule over S and the rows of the tokens since
// (kernels/recurrent/delta.py).
#include <math.h>

#include "kinds.h"
#include "rounding.h"
#include "scratch.h"
#include "team.h"
#include "unit.h"

namespace {

struct Call {
    const char *q, *k, *v;  // [batch, count, heads, dk], ..., [batch, count, heads * group, dv]
    const float *g, *beta;  // [batch, count, heads * group]
    const float *state;     // [batch, heads * group, dk, dv]
    float *keys, *deltas, *decays;  // rings: [batch, heads, size, dk], [batch, heads * group, size, dv or 1]
    float *out;                     // as v
    const int64_t *base, *positions;  // [batch], [batch, count]
    long q_batch, q_row, k_batch, k_row, v_batch, v_row;  // strides in bytes; heads follow each other
    int batch, count, heads, group, dk, dv, size, threads;
    float eps;  // beside a squared length
};

constexpr int MOST = 8;   // tokens of a step
constexpr int BLOCK = 4;  // vectors of a row of S whose sums lie in registers
#if defined(__AVX512F__)
constexpr int TOGETHER = 2;  // pairs of (key, query) that meet a row of S at once
#else
constexpr int TOGETHER = 1;
#endif

INLINE float dot(const float *a, const float *b, int size) {
    Floats sums[2] = {};
    int i = 0;
    for (; i + W <= size; i += W) sums[i / W % 2] += load(a + i) * load(b + i);
    float found = total(sums[0] + sums[1]);
    for (; i < size; i++) found += a[i] * b[i];
    return found;
}

// S^T x for T keys and T queries: out[t] and out[count + t] get `vectors` vectors of each.
template <int T>
INLINE void read_state(const float *state, int dk, int dv, const float *const *rows, int first, int vectors,
                       float *const *out) {
    Floats sums[2 * T][BLOCK] = {};
    const float *from = state + first;
    if (vectors == BLOCK)
        for (int i = 0; i < dk; i++, from += dv)
            UNROLL for (int j = 0; j < BLOCK; j++) {
                const Floats s = load(from + j * W);
                UNROLL for (int t = 0; t < 2 * T; t++) sums[t][j] += s * rows[t][i];
            }
    else
        for (int i = 0; i < dk; i++, from += dv)
            for (int j = 0; j < vectors; j++) {
                const Floats s = load(from + j * W);
                UNROLL for (int t = 0; t < 2 * T; t++) sums[t][j] += s * rows[t][i];
            }
    for (int t = 0; t < 2 * T; t++)
        for (int j = 0; j < vectors; j++) store(out[t] + first + j * W, sums[t][j]);
}

// What S brings to every token of the step: reads [2 * count, dv] for `units`, keys first.
INLINE void from_state(const Call &c, const float *state, const float *units, float *reads) {
    for (int i = 0; i < c.count; i += TOGETHER) {
        const float *rows[2 * TOGETHER];
        float *out[2 * TOGETHER];
        const int some = c.count - i < TOGETHER ? c.count - i : TOGETHER;
        for (int t = 0; t < some; t++) {
            rows[t] = units + (i + t) * c.dk, rows[some + t] = units + (c.count + i + t) * c.dk;
            out[t] = reads + (i + t) * c.dv, out[some + t] = reads + (c.count + i + t) * c.dv;
        }
        for (int at = 0; at < c.dv; at += BLOCK * W) {
            const int left = (c.dv - at) / W, vectors = left < BLOCK ? left : BLOCK;
            if (some == TOGETHER) read_state<TOGETHER>(state, c.dk, c.dv, rows, at, vectors, out);
            else read_state<1>(state, c.dk, c.dv, rows, at, vectors, out);
        }
    }
}

INLINE void add(float *to, const float *row, float weight, int size) {
    for (int i = 0; i < size; i += W) store(to + i, load(to + i) + load(row + i) * weight);
}

// What a thread works in, for one key head: its tokens' keys and queries, of length one and that scaled,
// their products with each other and with the rows of the ring, the weights of these rows, where they lie,
// and what a value head's tokens read.
struct Work {
    float *units, *own, *near, *weights, *reads;
    int *slots;
    static size_t bytes(const Call &c) {
        const size_t floats = 2 * c.count * ((size_t)c.count + 2 * c.size + c.dv + c.dk);
        return sizeof(float) * floats + sizeof(int) * c.size;
    }
    Work(void *at, const Call &c) {
        const long rows = 2 * c.count;
        reads = (float *)at, units = reads + rows * c.dv;
        near = units + rows * c.dk, weights = near + rows * c.size, own = weights + rows * c.size;
        slots = (int *)(own + rows * c.count);
    }
};

// Decay what S brought by all rows since, and add what the rows bring: row t weighs its product with a
// token, decayed by the rows after it.
INLINE void from_rows(const Call &c, const float *deltas, const float *decays, int held, const Work &work) {
    float since = 0;
    for (int t = held - 1; t >= 0; t--) {
        const float decay = expf(since);
        for (int i = 0; i < 2 * c.count; i++) work.weights[i * c.size + t] = decay * work.near[i * c.size + t];
        since += decays[work.slots[t]];
    }
    const float passed = expf(since);
    for (int i = 0; i < 2 * c.count; i++) {
        float *reads = work.reads + (long)i * c.dv;
        const float *weights = work.weights + (long)i * c.size;
        for (int j = 0; j < c.dv; j += W) {
            Floats sum = load(reads + j) * passed;
            for (int t = 0; t < held; t++) sum += load(deltas + (long)work.slots[t] * c.dv + j) * weights[t];
            store(reads + j, sum);
        }
    }
}

// The step's own tokens, one after the other: d and o, and the rows of the ring.
template <class K>
INLINE void tokens(const Call &c, int b, int head, float *deltas, float *decays, const char *values,
                   const Work &work) {
    const long first = c.positions[(long)b * c.count];
    float steps = 0, after[MOST];
    for (int i = 0; i < c.count; i++) {
        const long token = ((long)b * c.count + i) * c.heads * c.group + head;
        steps += c.g[token], after[i] = steps;
        const float decay = expf(steps), beta = c.beta[token];
        float *mine = work.reads + (long)i * c.dv, *wanted = work.reads + (long)(c.count + i) * c.dv;
        for (int j = 0; j < c.dv; j += W) {
            store(mine + j, load(mine + j) * decay);
            store(wanted + j, load(wanted + j) * decay);
        }
        for (int m = 0; m < i; m++) {
            const float passed = expf(steps - after[m]);
            const float *delta = deltas + (first + m) % c.size * c.dv;
            add(mine, delta, passed * work.own[i * c.count + m], c.dv);
            add(wanted, delta, passed * work.own[(c.count + i) * c.count + m], c.dv);
        }
        const long slot = (first + i) % c.size;
        float *delta = deltas + slot * c.dv, *out = c.out + token * c.dv;
        const char *v = values + i * c.v_row;
        const float ask = work.own[(c.count + i) * c.count + i];
        for (int j = 0; j < c.dv; j += W) {
            const Floats d = (K::read(v, j) - load(mine + j)) * beta;
            store(delta + j, d);
            store(out + j, load(wanted + j) + d * ask);
        }
        decays[slot] = c.g[token];
    }
}

template <class K>
static void key_head(const Call &c, int b, int head, const Work &work) {
    const long first = c.positions[(long)b * c.count], base = c.base[b];
    const int held = (int)(first - base);
    float *keys = c.keys + ((long)b * c.heads + head) * c.size * c.dk, *units = work.units;
    for (int i = 0; i < c.count; i++) {
        const long at = (long)head * c.dk * K::bytes;
        unit<K>(c.k + b * c.k_batch + i * c.k_row + at, c.dk, c.eps, 1, units + i * c.dk);
        unit<K>(c.q + b * c.q_batch + i * c.q_row + at, c.dk, c.eps, 1 / sqrtf(c.dk), units + (c.count + i) * c.dk);
    }
    for (int t = 0; t < held; t++) work.slots[t] = (int)((base + t) % c.size);
    for (int i = 0; i < 2 * c.count; i++) {
        for (int t = 0; t < held; t++)
            work.near[i * c.size + t] = dot(units + i * c.dk, keys + (long)work.slots[t] * c.dk, c.dk);
        for (int m = 0; m < c.count; m++)
            work.own[i * c.count + m] = dot(units + i * c.dk, units + m * c.dk, c.dk);
    }
    for (int i = 0; i < c.count; i++)
        memcpy(keys + (first + i) % c.size * c.dk, units + i * c.dk, sizeof(float) * c.dk);
    for (int of = head * c.group; of < (head + 1) * c.group; of++) {
        const long h = (long)b * c.heads * c.group + of;
        float *deltas = c.deltas + h * c.size * c.dv, *decays = c.decays + h * c.size;
        from_state(c, c.state + h * c.dk * c.dv, units, work.reads);
        from_rows(c, deltas, decays, held, work);
        tokens<K>(c, b, of, deltas, decays, c.v + b * c.v_batch + (long)of * c.dv * K::bytes, work);
    }
}

template <class K>
static int delta_step(const Call &c) {
    std::atomic<int> failed{0};
    share(c.threads, (long)c.batch * c.heads, 1, [&](int unit) {
        static thread_local Scratch scratch;
        void *at = scratch.get(Work::bytes(c));
        if (at) key_head<K>(c, unit / c.heads, unit % c.heads, Work(at, c));
        else failed = 2;
    });
    return failed;
}

}  // namespace

// Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_delta_step(const Call *c, int kind) {
#define DELTA(K) delta_step<K>(*c)
    OF_KIND(kind, DELTA);
}

extern "C" int omnikv_sizeof_delta_call() { return sizeof(Call); }
