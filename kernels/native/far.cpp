// A query that meets some rows at one distance, wherever they stand, and the newest at their own
// (kernels/kept/far.py): far keys are turned back as they are read, to where their run begins, and queries on to there. What attends to the
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

constexpr int RUN = 64;      // rows in turn whose keys are turned by a table, and queries to where they begin
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
    const double *freq;
    double *tables;  // [2][RUN][2][wide]
    float *few;      // [RUN][2][pairs]: the first table, rounded

    static int padded(int pairs) { return (pairs + W / 2 - 1) / (W / 2) * (W / 2); }
    static long doubles(int pairs) { return 2L * RUN * 2 * padded(pairs); }
    static long own(int pairs) { return 3L * 2 * padded(pairs); }  // doubles of a caller of `write`
    Turn turn(long number) const { return {tables + number * 2 * wide, wide}; }

    Turns(const double *freq, int count, double *memory, float *few)
        : pairs(count), wide(padded(count)), freq(freq), tables(memory), few(few) {
        memset(memory, 0, sizeof(double) * doubles(count));  // the rest of a vector
        for (int size = 0; size < 2; size++) {
            const long first = size * RUN;
            turn(first).angles(0, freq, pairs), turn(first + 1).angles(size ? RUN : 1, freq, pairs);
            for (int i = 2; i < RUN; i++) turn(first + i).product(turn(first + i / 2), turn(first + i - i / 2));
        }
        for (int i = 0; i < RUN; i++)
            for (int p = 0; p < pairs; p++)
                few[(long)2 * i * pairs + p] = (float)turn(i).at[p],
                          few[(long)(2 * i + 1) * pairs + p] = (float)turn(i).at[wide + p];
    }
    // The turn to `at`, by way of one to `before` (-1: none). memory: `own` doubles of the caller.
    Turn to(int64_t at, int64_t before, double *memory) const {
        const Turn most = {memory, wide}, some = {memory + 2 * wide, wide}, own = {memory + 4 * wide, wide};
        const int64_t run = at / RUN;
        if (before < 0 || run / RUN != before / RUN / RUN) most.angles((double)(run / RUN) * RUN * RUN, freq, pairs);
        some.product(most, turn(RUN + run % RUN)), own.product(some, turn(at % RUN));
        return own;
    }
};

// A query turned on, as floats.
void turn_query(const float *q, const Turn &turn, int pairs, int dim, float *to) {
    for (int d = 2 * pairs; d < dim; d++) to[d] = q[d];
    for (int p = 0; p < pairs; p++) {
        const double cos = turn.at[p], sin = turn.at[turn.wide + p], one = q[p], other = q[pairs + p];
        to[p] = (float)(one * cos - other * sin), to[pairs + p] = (float)(other * cos + one * sin);
    }
}

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

// One K/V head's queries attend to the far rows, run by run: a key is turned back by how far it is from the
// run's first, the queries on by where that stands. rows: room for RUN keys and the queries; memory: doubles
// as `Turns::to` wants; out [group][dim], not divided, best and sum [group] as attend_tile has them.
template <class K>
void attend_far(const Far &c, int head, const Turns &turns, double *memory, float *rows, float *out, float *best,
                float *sum) {
    const char *keys = c.far_k + head * c.far_key_head, *values = c.far_v + head * c.far_value_head;
    const float *given = c.distant + (long)head * c.group * c.dim;
    float *const q = rows + (long)RUN * c.dim;
    memset(memory, 0, sizeof(double) * Turns::own(c.pairs));
    memset(out, 0, sizeof(float) * c.group * c.dim);
    for (int g = 0; g < c.group; g++) best[g] = -INFINITY, sum[g] = 0;
    Block block;
    int64_t before = -1;
    for (int first = 0; first < c.far; first += block.count) {
        const int64_t stands = c.at[first];
        int count = 1;
        while (count < RUN && first + count < c.far && c.at[first + count] == stands + count) count++;
        const Turn turn = turns.to(stands, before, memory);
        before = stands;
        for (int g = 0; g < c.group; g++)
            turn_query(given + (long)g * c.dim, turn, c.pairs, c.dim, q + (long)g * c.dim);
        block.first = first, block.count = count;
        for (int i = 0; i < listed(count); i++) {
            const int t = first + i < c.far ? first + i : c.far - 1, own = i < count ? i : count - 1;
            block.keys[i] = (const char *)(rows + (long)own * c.dim);
            block.values[i] = values + row_of(c, t) * c.far_value_row;
        }
        for (int i = 0; i < count; i++) {
            const int t = first + i, next = t + AHEAD < c.far ? t + AHEAD : t;
            fetch(keys + row_of(c, next) * c.far_key_row, c.dim * K::bytes);
            const char *key = keys + row_of(c, t) * c.far_key_row;
            turn_key<K>(key, turns.few + (long)i * 2 * c.pairs, c.pairs, c.dim, rows + (long)i * c.dim);
        }
        int g = 0;
        for (; g + 4 <= c.group; g += 4)
            meet<K, 4>(c, block, q + (long)g * c.dim, out + (long)g * c.dim, best + g, sum + g);
        for (; g + 2 <= c.group; g += 2)
            meet<K, 2>(c, block, q + (long)g * c.dim, out + (long)g * c.dim, best + g, sum + g);
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
    const long parts = (long)queries * splits * (c.dim + 2), each = (long)(RUN + c.group) * c.dim;
    const long few = 2L * RUN * c.pairs, sums = (long)queries * (c.dim + 2), own = Turns::own(c.pairs);
    float *const lse = (float *)scratch.get(sizeof(float) * (queries + parts + sums + c.heads * each + few));
    double *const memory = (double *)tables.get(sizeof(double) * (Turns::doubles(c.pairs) + c.heads * own));
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
    float *const keys = sum + queries;
    const Turns turns(c.freq, c.pairs, memory, keys + c.heads * each);
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1)
    for (int head = 0; head < c.heads; head++) {
        const long at = (long)head * c.group;
        if (c.far)
            attend_far<K>(c, head, turns, memory + Turns::doubles(c.pairs) + head * own, keys + head * each,
                          far + at * c.dim, best + at, sum + at);
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
