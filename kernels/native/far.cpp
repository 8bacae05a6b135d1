// A query that meets some rows at one distance, wherever they stand, and the newest at their own
// (kernels/kept/far.py): far keys are turned back as they are read, to where their run begins, and queries on to there. What attends to the
// newest is attention.cpp.
#include "attention.h"
#include "rounding.h"
#include "scratch.h"
#include "team.h"
#include "turn.h"

extern "C" int omnikv_attend(const Call *c, int kind);
extern "C" void omnikv_topk(const float *scores, long stride, int rows, int columns, const int32_t *lo,
                            const int32_t *hi, const int32_t *k, int32_t *out, int room, int32_t *counts);

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

    // made: the tables hold what these angles make already
    Turns(const double *freq, int count, double *memory, float *few, bool made)
        : pairs(count), wide(padded(count)), freq(freq), tables(memory), few(few) {
        if (made) return;
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
    int p = 0;
    if (pairs % W == 0) {
        for (; p < pairs; p += W) {
            const Floats one = K::read(key, p), other = K::read(key, pairs + p);
            const Floats c = load(cos + p), s = load(sin + p);
            store(row + p, one * c + other * s), store(row + pairs + p, other * c - one * s);
        }
        for (int d = 2 * pairs; d < dim; d += W) store(row + d, K::read(key, d));
        return;
    }
    for (int d = 0; d < dim; d += W) store(row + d, K::read(key, d));
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

// The tables of the angles of the call before, which those of a session's next one mostly are.
struct KnownTurns {
    Scratch held;
    int pairs = 0;
    // [pairs] angles, then the tables; without memory they are NULL.
    Turns of(const double *freq, int count) {
        const long few = 2L * RUN * count, size = count + Turns::doubles(count);
        const size_t needed = sizeof(double) * size + sizeof(float) * few;
        if (needed > held.size) pairs = 0;
        double *const known = (double *)held.get(needed);
        if (!known) return Turns(freq, count, nullptr, nullptr, true);
        const bool made = pairs == count && !memcmp(known, freq, sizeof(double) * count);
        pairs = count;
        memcpy(known, freq, sizeof(double) * count);
        return Turns(freq, count, known + count, (float *)(known + size), made);
    }
};

template <class K>
int far_and_near(const Far &c, int kind) {
    static thread_local Scratch scratch, own_turns;
    static thread_local KnownTurns known;
    if (c.pairs > PAIRS || c.dim > 2 * PAIRS) return 1;
    const int queries = c.heads * c.group, splits = (c.near + c.split - 1) / c.split;
    const long parts = (long)queries * splits * (c.dim + 2), each = (long)(RUN + c.group) * c.dim;
    const long sums = (long)queries * (c.dim + 2), own = Turns::own(c.pairs);
    const Turns turns = known.of(c.freq, c.pairs);
    float *const lse = (float *)scratch.get(sizeof(float) * (queries + parts + sums + c.heads * each));
    double *const memory = (double *)own_turns.get(sizeof(double) * c.heads * own);
    if (!lse || !memory || !turns.tables) return 2;
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
    share(c.threads, c.heads, 1, [&](int head) {
        const long at = (long)head * c.group;
        if (c.far)
            attend_far<K>(c, head, turns, memory + head * own, keys + head * each,
                          far + at * c.dim, best + at, sum + at);
        for (long r = at; r < at + c.group; r++) {
            if (c.far) join_far(c, far + r * c.dim, best[r], sum[r], c.out + r * c.dim, lse + r);
            float *const weights = c.received + r * c.near;
            int t = 0;
            for (; t + W <= c.near; t += W) store(weights + t, exponential(load(weights + t) - lse[r]));
            for (; t < c.near; t++) weights[t] = expf(weights[t] - lse[r]);
        }
    });
    return 0;
}

}  // namespace

// kind: of kinds.h, of all rows. Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_far_and_near(const Far *c, int kind) {
#define ATTEND_FAR(K) far_and_near<K>(*c, kind)
    OF_KIND(kind, ATTEND_FAR);
}

extern "C" int omnikv_sizeof_far() { return sizeof(Far); }

namespace {

// A step of InfLLM (kernels/kept/stream.py): what is bound to a layer, and what is the step's own. Strides in
// bytes.
struct Stream {
    const char *k, *v;  // rows of all positions
    long key_head, key_row, value_head, value_row;
    const char *means;   // [blocks][heads * group * dim]: what blocks are ranked by
    float *scores[2];    // [heads * group][slots]: what each position has received, in slot position % slots
    const double *freq;  // [pairs]
    int heads, group, dim, pairs, init, local, block, topk, slots, split, kind, mean_kind, q_kind;
    float scale;
    // of the step
    int half;  // of `scores`, which is read; the other one is written
    int start, attended, initial, blocks, rest, threads;
    const float *cos, *sin;  // [pairs]: of the turn to the distance
    const char *q;
    char *out;        // [heads * group][dim]
    int64_t *places;  // [topk or blocks, if fewer]: takes the blocks that are read, ascending
};

// The query as it stands and turned to the distance, as floats: [queries][dim] each.
template <class Q>
void turned(const Stream &c, float *q, float *distant) {
    for (long r = 0, queries = (long)c.heads * c.group; r < queries; r++, q += c.dim, distant += c.dim) {
        for (int d = 0; d < c.dim; d += W) store(q + d, read_some<Q>(c.q, r * c.dim + d, W));
        memcpy(distant, q, sizeof(float) * c.dim);
        turn_pairs(c.cos, c.sin, c.pairs, distant);
    }
}

int turned(const Stream &c, float *q, float *distant) {
#define TURNED(K) (turned<K>(c, q, distant), 0)
    OF_KIND(c.q_kind, TURNED);
}

// The blocks of the largest sums over heads of query times mean. sums, found: of `blocks` elements.
template <class M>
void rank(const Stream &c, const float *query, float *sums, int32_t *found) {
    const long size = (long)c.heads * c.group * c.dim;
    for (int i = 0; c.blocks > c.topk && i < c.blocks; i++) {
        Floats sum = {};
        for (long d = 0; d < size; d += W) sum += M::read(c.means + i * size * M::bytes, d) * load(query + d);
        sums[i] = total(sum);
    }
    const int32_t zero = 0;
    int32_t count;
    omnikv_topk(sums, 0, 1, c.blocks, &zero, &c.blocks, &c.topk, found, c.topk, &count);
    for (int i = 0; i < count; i++) c.places[i] = found[i];
}

int ranked(const Stream &c, const float *query, float *sums, int32_t *found) {
#define RANKED(K) (rank<K>(c, query, sums, found), 0)
    OF_KIND(c.mean_kind, RANKED);
}

// Where the far rows stand: the first ones, the chosen blocks, and what is in no block. Returns their number.
int far_rows(const Stream &c, int64_t *at) {
    int count = 0, chosen = c.blocks < c.topk ? c.blocks : c.topk;
    for (int t = 0; t < c.initial; t++) at[count++] = t;
    for (int i = 0; i < chosen; i++)
        for (int t = 0; t < c.block; t++) at[count++] = c.init + c.places[i] * c.block + t;
    for (int t = c.rest; t < c.start + 1 - c.local; t++) at[count++] = t;
    return count;
}

// The slots of positions first .. stop - 1 take add(row, slot, position) of each.
template <class Add>
void in_slots(const Stream &c, int first, int stop, const Add &add) {
    while (first < stop) {
        const int slot = first % c.slots, rest = c.slots - slot, count = stop - first < rest ? stop - first : rest;
        add(slot, first, count);
        first += count;
    }
}

// The other half of the scores: those there are, without what no position has any more, and what the newest
// `local` positions have received.
void collect(const Stream &c, const float *received) {
    const int stop = c.start + 1, first = stop - c.local, known = c.attended < c.start ? c.attended : c.start;
    for (long r = 0; r < (long)c.heads * c.group; r++, received += c.local) {
        float *const to = c.scores[1 - c.half] + r * c.slots;
        memcpy(to, c.scores[c.half] + r * c.slots, sizeof(float) * c.slots);
        in_slots(c, known > stop - c.slots ? known : stop - c.slots, stop,
                 [&](int slot, int, int count) { memset(to + slot, 0, sizeof(float) * count); });
        in_slots(c, first, stop, [&](int slot, int position, int count) {
            const float *const added = received + (position - first);
            for (int i = 0; i < count; i++) to[slot + i] += added[i];
        });
    }
}

template <class Q>
void round_out(const float *found, long count, char *out) {
    for (long i = 0; i < count; i += W) write_some<Q>(out, i, W, load(found + i));
}

}  // namespace

// A step's query attends to its window and, at one distance, to the first tokens, the blocks that it likes best
// and what is in no block yet; what its window receives is added. Returns as omnikv_far_and_near.
extern "C" int omnikv_stream_step(const Stream *given) {
    const Stream &c = *given;
    static thread_local Scratch scratch, places;
    const long queries = (long)c.heads * c.group, size = queries * c.dim;
    const int chosen = c.blocks < c.topk ? c.blocks : c.topk, edge = c.start + 1 - c.local;
    const long far = c.initial + (long)chosen * c.block + (edge > c.rest ? edge - c.rest : 0);
    float *const q = (float *)scratch.get(sizeof(float) * (3 * size + queries * c.local + c.blocks));
    int64_t *const at = (int64_t *)places.get(sizeof(int64_t) * (far + 1) + sizeof(int32_t) * c.topk);
    if (!q || !at) return 2;
    float *const distant = q + size, *const out = distant + size, *const received = out + size;
    float *const sums = received + queries * c.local;
    if (turned(c, q, distant) || ranked(c, distant, sums, (int32_t *)(at + far))) return 1;
    Far call = {};
    call.q = q, call.distant = distant, call.at = call.rows = at, call.freq = c.freq;
    call.far_k = c.k, call.far_v = c.v, call.k = c.k + edge * c.key_row, call.v = c.v + edge * c.value_row;
    call.far_key_head = call.key_head = c.key_head, call.far_key_row = call.key_row = c.key_row;
    call.far_value_head = call.value_head = c.value_head, call.far_value_row = call.value_row = c.value_row;
    call.out = out, call.received = received, call.heads = c.heads, call.group = c.group, call.dim = c.dim;
    call.far = far_rows(c, at), call.near = c.local, call.pairs = c.pairs, call.split = c.split;
    call.threads = c.threads, call.scale = c.scale;
    if (const int fault = omnikv_far_and_near(&call, c.kind)) return fault;
    collect(c, received);
#define ROUND_OUT(K) (round_out<K>(out, size, c.out), 0)
    OF_KIND(c.q_kind, ROUND_OUT);
}

extern "C" int omnikv_sizeof_stream() { return sizeof(Stream); }
