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

constexpr int RUN = 64;      // rows whose turns are one turn times one of a table
constexpr int SOME = 64;     // far rows at a time: turned keys stay in the first cache
constexpr int PAIRS = 1024;  // most pairs of a head

typedef double Doubles __attribute__((vector_size(4 * W), aligned(8), may_alias));

// cos and sin of `pairs` angles, in vectors of doubles: [2][wide].
struct Turn {
    double *at;
    int wide;
    static inline Doubles &cos(const Turn &t, int p) { return *(Doubles *)(t.at + p); }
    static inline Doubles &sin(const Turn &t, int p) { return *(Doubles *)(t.at + t.wide + p); }
    void angles(double times, const double *freq, int pairs) const {
        for (int p = 0; p < pairs; p++) {
            const double angle = times * freq[p];
            at[p] = ::cos(angle), at[wide + p] = ::sin(angle);
        }
    }
    void product(const Turn &one, const Turn &two) const {
        for (int p = 0; p < wide; p += W / 2) {
            const Doubles c = cos(one, p), s = sin(one, p), d = cos(two, p), t = sin(two, p);
            cos(*this, p) = c * d - s * t, sin(*this, p) = s * d + c * t;
        }
    }
};

// Turns by RUN * RUN * a + RUN * b + c, for all heads of a layer: a by the library, b and c by tables that
// double what they have, so that an angle is at most 2 * log2(RUN) products from one of the library's.
struct Turns {
    int pairs, wide;
    double *tables;  // [2][RUN][2][wide], then three of [2][wide]

    static int padded(int pairs) { return (pairs + W / 2 - 1) / (W / 2) * (W / 2); }
    static long doubles(int pairs) { return (2L * RUN + 3) * 2 * padded(pairs); }
    Turn turn(long number) const { return {tables + number * 2 * wide, wide}; }

    Turns(const double *freq, int count, double *memory) : pairs(count), wide(padded(count)), tables(memory) {
        memset(memory, 0, sizeof(double) * doubles(count));  // the rest of a vector
        for (int size = 0; size < 2; size++) {
            const long first = size * RUN;
            turn(first).angles(0, freq, pairs), turn(first + 1).angles(size ? RUN : 1, freq, pairs);
            for (int i = 2; i < RUN; i++) turn(first + i).product(turn(first + i / 2), turn(first + i - i / 2));
        }
    }
    // table [count][2][pairs]: cos and sin of at[i] * freq.
    void write(const int64_t *at, int count, const double *freq, float *table) const {
        const Turn most = turn(2 * RUN), some = turn(2 * RUN + 1), own = turn(2 * RUN + 2);
        for (int i = 0; i < count; i++, table += 2 * pairs) {
            const int64_t run = at[i] / RUN, before = i ? at[i - 1] / RUN : -1;
            if (!i || run / RUN != before / RUN) most.angles((double)(run / RUN) * RUN * RUN, freq, pairs);
            if (!i || run != before) some.product(most, turn(RUN + run % RUN));
            own.product(some, turn(at[i] % RUN));
            for (int p = 0; p < pairs; p++) table[p] = (float)own.at[p], table[pairs + p] = (float)own.at[wide + p];
        }
    }
};

// A row of K as floats, turned back from where it stands.
template <class K>
INLINE void turn_key(const char *key, const float *cos, int pairs, int dim, float *row) {
    const float *sin = cos + pairs;
    for (int d = 0; d < dim; d += W) store(row + d, K::read(key, d));
    int p = 0;
    for (; p + W <= pairs; p += W) {
        const Floats one = load(row + p), other = load(row + pairs + p), c = load(cos + p), s = load(sin + p);
        store(row + p, one * c + other * s), store(row + pairs + p, other * c - one * s);
    }
    for (; p < pairs; p++) {
        const float one = row[p], other = row[pairs + p];
        row[p] = one * cos[p] + other * sin[p], row[pairs + p] = other * cos[p] - one * sin[p];
    }
}

// T queries attend to rows first .. first + block.count - 1 of the far ones, whose keys are turned.
template <class K, int T>
void meet(const Far &c, const Block &block, const float *q, float *out, float *best, float *sum) {
    int all[T];
    for (int r = 0; r < T; r++) all[r] = c.far;
    attend_tile<Float32, K, T>(q, block, c.dim, c.scale, 0, nullptr, all, out, best, sum, nullptr, 0);
}

// One K/V head's queries attend to the far rows. turns [far][2][pairs]; rows: room for SOME keys; out
// [group][dim], not divided, best and sum [group] as attend_tile has them.
template <class K>
void attend_far(const Far &c, int head, const float *turns, float *rows, float *out, float *best, float *sum) {
    const char *keys = c.far_k + head * c.far_key_head, *values = c.far_v + head * c.far_value_head;
    const float *q = c.distant + (long)head * c.group * c.dim;
    memset(out, 0, sizeof(float) * c.group * c.dim);
    for (int g = 0; g < c.group; g++) best[g] = -INFINITY, sum[g] = 0;
    Block block;
    for (int first = 0; first < c.far; first += SOME) {
        block.first = first, block.count = first + SOME < c.far ? SOME : c.far - first;
        for (int i = 0; i < listed(block.count); i++) {
            const int t = first + i < c.far ? first + i : c.far - 1, own = i < block.count ? i : block.count - 1;
            block.keys[i] = (const char *)(rows + (long)own * c.dim);
            block.values[i] = values + row_of(c, t) * c.far_value_row;
        }
        for (int i = 0; i < block.count; i++) {
            const int t = first + i, next = t + AHEAD < c.far ? t + AHEAD : t;
            fetch(keys + row_of(c, next) * c.far_key_row, c.dim * K::bytes);
            const char *key = keys + row_of(c, t) * c.far_key_row;
            turn_key<K>(key, turns + (long)t * 2 * c.pairs, c.pairs, c.dim, rows + (long)i * c.dim);
        }
        int g = 0;
        for (; g + 4 <= c.group; g += 4)
            meet<K, 4>(c, block, q + (long)g * c.dim, out + (long)g * c.dim, best + g, sum + g);
        for (; g < c.group; g++)
            meet<K, 1>(c, block, q + (long)g * c.dim, out + (long)g * c.dim, best + g, sum + g);
    }
}

// One query's sums over the far rows join the mean over the newest: out [dim] and its lse.
void join_far(const Far &c, const float *far, float best, float sum, float *out, float *lse) {
    const float top = best > *lse || best != best ? best : *lse, base = top == -INFINITY ? 0 : top;
    const float share = expf(*lse - base), weight = expf(best - base);
    const float whole = share + sum * weight;
    for (int d = 0; d < c.dim; d += W)
        store(out + d, (load(out + d) * share + load(far + d) * weight) / whole);
    *lse = top + logf(whole);
}

template <class K>
int far_and_near(const Far &c, int kind) {
    static thread_local Scratch scratch, tables;
    if (c.pairs > PAIRS || c.dim > 2 * PAIRS) return 1;
    const int queries = c.heads * c.group, splits = (c.near + c.split - 1) / c.split;
    const long parts = (long)queries * splits * (c.dim + 2), rows = (long)c.heads * SOME * c.dim;
    const long turned = 2L * c.far * c.pairs, sums = (long)queries * (c.dim + 2);
    float *const lse = (float *)scratch.get(sizeof(float) * (queries + parts + sums + rows + turned));
    double *const memory = (double *)tables.get(sizeof(double) * Turns::doubles(c.pairs));
    if (!lse || !memory) return 2;
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
    float *const far = lse + queries + parts, *const best = far + (long)queries * c.dim, *const sum = best + queries;
    float *const keys = sum + queries, *const turns = keys + rows;
    if (c.far) Turns(c.freq, c.pairs, memory).write(c.at, c.far, c.freq, turns);
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1)
    for (int head = 0; head < c.heads; head++) {
        const long at = (long)head * c.group;
        if (c.far)
            attend_far<K>(c, head, turns, keys + (long)head * SOME * c.dim, far + at * c.dim, best + at, sum + at);
        for (long r = at; r < at + c.group; r++) {
            if (c.far) join_far(c, far + r * c.dim, best[r], sum[r], c.out + r * c.dim, lse + r);
            float *const weights = c.received + r * c.near;
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
