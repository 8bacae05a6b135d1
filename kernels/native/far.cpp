// A query that meets some rows at one distance, wherever they stand, and the newest at their own
// (kernels/kept/far.py): far keys are turned back to position 0 as they are read. What attends to the
// newest is attention.cpp.
#include "attention.h"
#include "scratch.h"

extern "C" int omnikv_attend(const Call *c, int kind);

namespace {

struct Far {  // strides in bytes
    const float *q, *distant;  // [heads * group][dim]: the query as it stands, and turned to the distance
    const char *far_k, *far_v, *k, *v;
    long far_key_head, far_key_row, far_value_head, far_value_row;
    long key_head, key_row, value_head, value_row;
    const int64_t *at;   // [far]: where far rows stand
    const int64_t *rows;  // [far]: which of the rows given they are; NULL: in turn
    const double *freq;  // [pairs]
    float *out;          // [heads * group][dim]
    float *received;     // [heads * group][near]: the query's weights on the newest
    int heads, group, dim, far, near, pairs, split, threads;
    float scale;
};

INLINE long row_of(const Far &c, int t) { return c.rows ? c.rows[t] : t; }

constexpr int ANCHOR = 64;   // rows in turn whose angles follow from the one before
constexpr int SOME = 128;    // far values that are summed at a time
constexpr int PAIRS = 1024;  // most pairs of a head

// cos and sin of at[i] * freq, from those of at[i - 1] where it is one less.
struct Angles {
    alignas(64) double cos[PAIRS], sin[PAIRS], one_cos[PAIRS], one_sin[PAIRS];
    const double *freq;
    int pairs, since = 0;

    Angles(const double *of, int count) : freq(of), pairs(count) {
        for (int i = 0; i < pairs; i++) one_cos[i] = ::cos(freq[i]), one_sin[i] = ::sin(freq[i]);
    }
    void move(const int64_t *at, int i) {
        if (i && at[i] == at[i - 1] + 1 && ++since < ANCHOR) {
            for (int p = 0; p < pairs; p++) {
                const double c = cos[p], s = sin[p];
                cos[p] = c * one_cos[p] - s * one_sin[p], sin[p] = s * one_cos[p] + c * one_sin[p];
            }
            return;
        }
        since = 0;
        for (int p = 0; p < pairs; p++) {
            const double angle = (double)at[i] * freq[p];
            cos[p] = ::cos(angle), sin[p] = ::sin(angle);
        }
    }
};

// The logits [group][far] of one K/V head's queries on the far rows.
template <class K>
void far_logits(const Far &c, int head, float *logits) {
    Angles angles(c.freq, c.pairs);
    alignas(64) float row[2 * PAIRS];
    const char *keys = c.far_k + head * c.far_key_head;
    const float *q = c.distant + (long)head * c.group * c.dim;
    for (int t = 0; t < c.far; t++) {
        const char *key = keys + row_of(c, t) * c.far_key_row;
        if (t + AHEAD < c.far) fetch(keys + row_of(c, t + AHEAD) * c.far_key_row, c.dim * K::bytes);
        angles.move(c.at, t);
        for (int d = 0; d < c.dim; d += W) store(row + d, K::read(key, d));
        for (int p = 0; p < c.pairs; p++) {
            const float one = row[p], other = row[c.pairs + p];
            const float cos = (float)angles.cos[p], sin = (float)angles.sin[p];
            row[p] = one * cos + other * sin, row[c.pairs + p] = other * cos - one * sin;
        }
        for (int g = 0; g < c.group; g++) {
            Floats sum = {};
            for (int d = 0; d < c.dim; d += W) sum += load(row + d) * load(q + (long)g * c.dim + d);
            logits[(long)g * c.far + t] = total(sum) * c.scale;
        }
    }
}

// One query's softmax over the far rows joins that over the newest: out [dim] and its lse; logits become
// weights.
template <class K>
void join_far(const Far &c, const char *values, float *logits, float *out, float *lse) {
    float top = *lse;
    for (int t = 0; t < c.far; t++) top = logits[t] > top || logits[t] != logits[t] ? logits[t] : top;
    const float base = top == -INFINITY ? 0 : top, share = expf(*lse - base);
    Floats added = {};
    int t = 0;
    for (; t + W <= c.far; t += W) {
        const Floats weight = exponential(load(logits + t) - base);
        store(logits + t, weight);
        added += weight;
    }
    float sum = share + total(added);
    for (; t < c.far; t++) sum += logits[t] = expf(logits[t] - base);
    for (int d = 0; d < c.dim; d += W) store(out + d, load(out + d) * share);
    // some rows at a time: they stay in the first cache, and short sums are closer
    for (int first = 0; first < c.far; first += SOME)
        for (int d = 0; d < c.dim; d += W) {
            const int stop = first + SOME < c.far ? first + SOME : c.far;
            Floats own = {};
            for (int i = first; i < stop; i++)
                own += K::read(values + row_of(c, i) * c.far_value_row, d) * logits[i];
            store(out + d, load(out + d) + own);
        }
    for (int d = 0; d < c.dim; d += W) store(out + d, load(out + d) / sum);
    *lse = top + logf(sum);
}

template <class K>
int far_and_near(const Far &c, int kind) {
    static thread_local Scratch scratch;
    if (c.pairs > PAIRS || c.dim > 2 * PAIRS) return 1;
    const int queries = c.heads * c.group, splits = (c.near + c.split - 1) / c.split;
    const long parts = (long)queries * splits * (c.dim + 2), far = (long)queries * c.far;
    float *const lse = (float *)scratch.get(sizeof(float) * (queries + parts + far));
    if (!lse) return 2;
    Call call = {};
    call.q = c.q, call.out = c.out, call.lse = lse, call.parts = lse + queries;
    call.k = c.k, call.v = c.v;
    call.key_head = c.key_head, call.key_row = c.key_row;
    call.value_head = c.value_head, call.value_row = c.value_row;
    call.logits = c.received, call.ahead = c.near;
    call.heads = c.heads, call.queries = 1, call.group = c.group, call.dim = c.dim;
    call.visited = c.near, call.split = c.split, call.threads = c.threads, call.shared = 1;
    call.scale = c.scale;
    if (const int fault = omnikv_attend(&call, kind)) return fault;
    float *const logits = lse + queries + parts;
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1)
    for (int head = 0; head < c.heads; head++) {
        float *const own = logits + (long)head * c.group * c.far;
        if (c.far) far_logits<K>(c, head, own);
        for (int g = 0; g < c.group; g++) {
            const int r = head * c.group + g;
            float *const out = c.out + (long)r * c.dim;
            const char *values = c.far_v + head * c.far_value_head;
            if (c.far) join_far<K>(c, values, own + (long)g * c.far, out, lse + r);
            float *const weights = c.received + (long)r * c.near;
            int t = 0;
            for (; t + W <= c.near; t += W) store(weights + t, exponential(load(weights + t) - lse[r]));
            for (; t < c.near; t++) weights[t] = expf(weights[t] - lse[r]);
        }
    }
    return 0;
}

}  // namespace

// kind: of kinds.h, of all rows. Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_far_and_near(const Far *c, int kind) {
#define ATTEND_FAR(K) far_and_near<K>(*c, kind)
    OF_KIND(kind, ATTEND_FAR);
}

extern "C" int omnikv_sizeof_far() { return sizeof(Far); }
