// A step over the rows that K/V heads have kept: the new token's row is written behind the others, and
// its query attends to them, in one call. What attends is attention.cpp.
#include "attention.h"
#include "rounding.h"
#include "scratch.h"

extern "C" int omnikv_attend(const Call *c, int kind);

namespace {

struct Step {  // strides in bytes, but for those of positions, scores and turns, which count elements
    const char *q;  // [heads * group][dim]
    char *out;      // the same
    const char *new_k, *new_v;
    long new_key_head, new_value_head;
    char *k, *v;
    long key_head, key_row, value_head, value_row;
    int32_t *positions;
    long position_head;
    float *scores;  // [heads][kinds][..]: the new row's become 0; or NULL
    long score_head, score_query;
    float *left;  // [heads][group][held + 1]: takes the query's logits, or what it weighs; or NULL
    // [heads] each, in place of `held`, where heads have rows of their own in one run of them: where they
    // begin, how many there are with the new one, and where that one goes; or NULL
    const int64_t *starts, *lengths, *slots;
    const float *sinks;       // [heads * group], the model's own; or NULL
    const float *cos, *sin;  // [1 or first][pairs]: what turns the query where it meets the first rows
    long turn;               // from one of the first rows' to the next's
    int key_bytes, value_bytes, heads, group, dim, held;
    int at;      // the new token's position
    int first;   // rows in front that the query meets turned; 0: none
    int oldest;  // of the rows behind those, positions below it are not seen
    int pairs, kinds, weighs, split, threads;
    float scale, cap;
};

constexpr int UNSEEN = INT32_MIN;  // `oldest` where every row is seen

void put(const Step &c) {
    for (int h = 0; h < c.heads; h++) {
        const long row = c.slots ? c.slots[h] : c.held;
        memcpy(c.k + h * c.key_head + row * c.key_row, c.new_k + h * c.new_key_head, c.key_bytes);
        memcpy(c.v + h * c.value_head + row * c.value_row, c.new_v + h * c.new_value_head, c.value_bytes);
        c.positions[h * c.position_head + row] = c.at;
        for (int i = 0; c.scores && i < c.kinds; i++)
            c.scores[h * c.score_head + i * c.score_query + row] = 0;
    }
}

// Rows behind the first whose positions are seen; all heads hold the same ones.
int list_seen(const Step &c, int32_t *index) {
    int found = 0;
    for (int row = c.first; row <= c.held; row++) {
        index[found] = row;
        found += c.positions[row] >= c.oldest;
    }
    return found;
}

// The pairs (i, i + pairs) of a query turned; what lies behind them stays.
void turn(const float *q, const float *cos, const float *sin, int pairs, int dim, float *out) {
    for (int i = 0; i < pairs; i++) {
        const float one = q[i], other = q[pairs + i];
        out[i] = one * cos[i] - other * sin[i], out[pairs + i] = other * cos[i] + one * sin[i];
    }
    memcpy(out + 2 * pairs, q + 2 * pairs, sizeof(float) * (dim - 2 * pairs));
}

// One query's attention to the first rows joins that to the others: out [dim] and its lse. logits [first]
// and turned [dim] are room.
template <class R>
void join_first(const Step &c, int head, const float *q, float *out, float *lse, float *logits, float *turned) {
    const char *keys = c.k + head * c.key_head, *values = c.v + head * c.value_head;
    float top = *lse;
    for (int s = 0; s < c.first; s++) {
        if (!s || c.turn) turn(q, c.cos + s * c.turn, c.sin + s * c.turn, c.pairs, c.dim, turned);
        Floats sum = {};
        for (int d = 0; d < c.dim; d += W) sum += R::read(keys + s * c.key_row, d) * load(turned + d);
        float logit = total(sum) * c.scale;
        if (c.cap) logit = capped(all(logit), c.cap)[0];
        logits[s] = logit;
        top = logit > top || logit != logit ? logit : top;
    }
    const float base = top == -INFINITY ? 0 : top;
    float share = expf(*lse - base), weights = share;
    for (int s = 0; s < c.first; s++) weights += logits[s] = expf(logits[s] - base);
    for (int d = 0; d < c.dim; d += W) {
        Floats sum = load(out + d) * share;
        for (int s = 0; s < c.first; s++) sum += R::read(values + s * c.value_row, d) * logits[s];
        store(out + d, sum / weights);
    }
    *lse = top + logf(weights);
}

// The model's sinks join a query's softmax: they bring no value.
void sink(float logit, int dim, float *out, float *lse) {
    const float top = logit > *lse || logit != logit ? logit : *lse;
    const float all_of_it = top + logf(expf(*lse - top) + expf(logit - top));
    const float share = expf(*lse - all_of_it);
    for (int d = 0; d < dim; d += W) store(out + d, load(out + d) * share);
    *lse = all_of_it;
}

void weigh(float *logits, float lse, int count) {
    int t = 0;
    for (; t + W <= count; t += W) store(logits + t, exponential(load(logits + t) - lse));
    if (t == count) return;
    float rest[W] = {};
    memcpy(rest, logits + t, sizeof(float) * (count - t));
    store(rest, exponential(load(rest) - lse));
    memcpy(logits + t, rest, sizeof(float) * (count - t));
}

template <class Q, class R>
int kept_step(const Step &c, int kind) {
    static thread_local Scratch scratch;
    const int queries = c.heads * c.group, rows = c.held + 1;
    const long size = (long)queries * c.dim;
    const long parts = (long)queries * ((rows + c.split - 1) / c.split) * (c.dim + 2);
    float *const q = (float *)scratch.get(sizeof(float) * (2 * size + queries + parts + c.first + c.dim + rows));
    if (!q) return 2;
    float *const out = q + size, *const lse = out + size, *const part = lse + queries;
    float *const logits = part + parts, *const turned = logits + c.first;
    int32_t *const index = (int32_t *)(turned + c.dim);
    put(c);
    for (long i = 0; i < size; i += W) store(q + i, Q::read(c.q, i));
    Call call = {};
    call.q = q, call.out = out, call.lse = lse, call.parts = part;
    call.k = c.k, call.v = c.v;
    call.key_head = c.key_head, call.key_row = c.key_row;
    call.value_head = c.value_head, call.value_row = c.value_row;
    call.logits = c.left, call.ahead = rows;
    call.starts = c.starts, call.lengths = c.lengths;
    call.heads = c.heads, call.queries = 1, call.group = c.group, call.dim = c.dim;
    call.start = c.first, call.visited = rows - c.first;
    if (c.oldest != UNSEEN) {
        call.index = index, call.kept = call.visited = list_seen(c, index);
        call.start = rows;
    }
    call.split = c.split, call.threads = c.threads, call.shared = 1;
    call.scale = c.scale, call.cap = c.cap;
    if (const int fault = omnikv_attend(&call, kind)) return fault;
    for (int r = 0; r < queries; r++) {
        float *const own = out + (long)r * c.dim;
        if (c.first) join_first<R>(c, r / c.group, q + (long)r * c.dim, own, lse + r, logits, turned);
        if (c.sinks) sink(c.sinks[r], c.dim, own, lse + r);
        if (c.left && c.weighs) weigh(c.left + (long)r * rows, lse[r], rows);
    }
    for (long i = 0; i < size; i += W) write_some<Q>(c.out, i, W, load(out + i));
    return 0;
}

}  // namespace

// kinds of kinds.h: of the store's rows, and of q and out, which is the same. Returns 0, 1 for a kind that
// this build lacks, or 2 without memory.
extern "C" int omnikv_kept_step(const Step *c, int kind) {
#define STEP(K) kept_step<K, K>(*c, kind)
    OF_KIND(kind, STEP);
}

extern "C" int omnikv_sizeof_kept() { return sizeof(Step); }
