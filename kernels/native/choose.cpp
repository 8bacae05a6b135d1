// What queries choose by an index of K (kernels/index/choose.py): logits, their weights where these rank,
// one score of a group's heads, the largest ones, and what these weigh of all, in one call. What chooses
// among scores is topk.cpp.
#include "call.h"
#include "indexed.h"
#include "learnt.h"
#include "scratch.h"
#include "team.h"

extern "C" void omnikv_topk(const float *scores, long stride, int rows, int columns, const int32_t *lo,
                            const int32_t *hi, const int32_t *k, int32_t *out, int room, int32_t *counts);
extern "C" int omnikv_attend_heads(const Call *c, int kind, const char *q, char *out, int q_kind);
extern "C" int omnikv_learn_channels(const Learnt *c);
extern "C" int omnikv_learn_code(const Learnt *c);
extern "C" int omnikv_add_value(const Learnt *c);

namespace {

struct Choice {
    const char *q;            // [heads * group][dim], of a float kind
    const int64_t *channels;  // [heads][terms]: of each row of the index; NULL: it has a row of each channel,
                              // and those count in which a head's queries are largest
    const char *index;        // [heads][..][tokens]: K by channel, or codes; strides in bytes
    const char *centroids;    // [heads][terms][sums][dim / terms], of codes
    long index_head, index_row, centroid_head, centroid_part;
    float *logits;   // [heads * group][..]; NULL: none are wanted
    float *scores;   // [choices][..]
    float *weights;  // [heads * group]: what a query's choice and its newest tokens weigh; or NULL
    const int32_t *stop, *room;  // [choices]: the tokens below `stop` compete for as many places
    int32_t *out, *counts;       // [choices][most], [choices]
    long logits_row, scores_row;  // elements
    int heads, group, dim, terms, sums;
    int first, tokens;  // those that have logits; the tokens before the first are chosen first
    int newest, most, q_kind, index_kind, centroid_kind, reduce, threads;
    float scale;
};

enum { MAX, MEAN, SUM, NONE };  // REDUCE of kernels/index/choose.py

constexpr int PART = 4096;  // tokens of a thread's piece

INLINE Floats most_or_nan(Floats a, Floats b) { return ((a > b) | (a != a)) ? a : b; }

// `of` [group][..], `row` apart, as one row that ranks: tokens first .. stop - 1 into `to`.
INLINE void reduce(const float *of, long row, const float *factors, int group, int how, int first, int stop,
                   float *to) {
    for (int t = first; t < stop; t += W) {
        const int count = stop - t;
        Floats found = read_some<Float32>(of, t, count) * (factors ? factors[0] : 1);
        for (int g = 1; g < group; g++) {
            const Floats x = read_some<Float32>(of + g * row, t, count) * (factors ? factors[g] : 1);
            found = how == MAX ? most_or_nan(found, x) : found + x;
        }
        store_some(to + t, count, how == MEAN ? found / (float)group : found);
    }
}

template <class K>
void widen(const char *q, long count, float *to) {
    for (long i = 0; i < count; i += W) {
        const int some = count - i < W ? (int)(count - i) : W;
        store_some(to + i, some, read_some<K>(q, i, some));
    }
}

int widened(const Choice &c, float *to) {
#define WIDEN(K) (widen<K>(c.q, (long)c.heads * c.group * c.dim, to), 0)
    OF_KIND(c.q_kind, WIDEN);
}

// ---------------------------------------------------------------- channels

// The parts of a head's queries q [group][dim] that count, [group][terms], and which rows of the index
// they meet. SparQ, Algorithm 1: the channels of the largest sums of |q|, and a temperature for those left out.
void parts_of(const Choice &c, int head, const float *q, float *sizes, float *given, int64_t *rows) {
    int32_t *largest = (int32_t *)(sizes + c.dim);
    if (!c.channels) {
        const int32_t zero = 0;
        int32_t count;
        for (int d = 0; d < c.dim; d++) {
            sizes[d] = 0;
            for (int g = 0; g < c.group; g++) sizes[d] += fabsf(q[g * c.dim + d]);
        }
        omnikv_topk(sizes, c.dim, 1, c.dim, &zero, &c.dim, &c.terms, largest, c.terms, &count);
    }
    for (int i = 0; i < c.terms; i++) rows[i] = c.channels ? i : largest[i];
    for (int g = 0; g < c.group; g++, q += c.dim, given += c.terms) {
        float scale = c.scale, all = 0, some = 0;
        for (int d = 0; d < c.dim; d++) all += fabsf(q[d]);
        for (int i = 0; i < c.terms; i++) {
            given[i] = q[c.channels ? c.channels[(long)head * c.terms + i] : rows[i]];
            some += fabsf(given[i]);
        }
        if (!c.channels) {
            const float cover = some / (all > 1e-30f ? all : 1e-30f);
            scale /= sqrtf(cover > 1e-30f ? cover : 1e-30f);
        }
        for (int i = 0; i < c.terms; i++) given[i] *= scale;
    }
}

// ---------------------------------------------------------------- codes

// Products of one query q [dim] with `sums` centroids, `scale` times, into whole vectors.
template <class K>
void table_of(const float *q, const char *centroids, int dim, int sums, float scale, float *to) {
    for (int c = 0; c < table_row(sums); c += W) {
        Floats parts[W] = {};
        for (int i = 0; i < W && c + i < sums; i++)
            for (int d = 0; d < dim; d += W) {
                const int count = dim - d < W ? dim - d : W;
                const char *row = centroids + (long)(c + i) * dim * K::bytes;
                parts[i] += read_some<K>(row, d, count) * read_some<Float32>(q, d, count);
            }
        store(to + c, totals(parts) * scale);
    }
}

// The tables of a head's queries q [group][dim]: [terms][group][table_row(sums)].
template <class K>
void tables_of(const Choice &c, int head, const float *q, float *to) {
    const int width = c.dim / c.terms, row = table_row(c.sums);
    for (int p = 0; p < c.terms; p++) {
        const char *centroids = c.centroids + head * c.centroid_head + p * c.centroid_part;
        for (int g = 0; g < c.group; g++, to += row)
            table_of<K>(q + g * c.dim + p * width, centroids, width, c.sums, c.scale, to);
    }
}

int tables(const Choice &c, int head, const float *q, float *to) {
#define TABLES(K) (tables_of<K>(c, head, q, to), 0)
    OF_KIND(c.centroid_kind, TABLES);
}

// ---------------------------------------------------------------- weights

// The largest of x[first] .. x[stop - 1].
float largest_of(const float *x, int first, int stop) {
    Floats top = all(-INFINITY);
    int t = first;
    for (; t + W <= stop; t += W) top = most(top, load(x + t));
    float found = largest(top);
    for (; t < stop; t++) found = x[t] > found ? x[t] : found;
    return found == -INFINITY ? 0 : found;
}

// The sum of e^(x - top) over first .. stop - 1; keep: these replace x.
template <bool keep>
float weigh(float *x, int first, int stop, float top) {
    Floats sum = {};
    int t = first;
    for (; t + W <= stop; t += W) {
        const Floats weight = exponential(load(x + t) - top);
        if (keep) store(x + t, weight);
        sum += weight;
    }
    float found = total(sum);
    if (t >= stop) return found;
    const Floats weight = exponential(read_some<Float32>(x, t, stop - t) - top);
    if (keep) store_some(x + t, stop - t, weight);
    for (int i = 0; i < stop - t; i++) found += weight[i];
    return found;
}

// What x[first] .. x[stop - 1] are multiplied by so that their sum is 1; 0 where they vanish.
float factor_of(const float *x, int first, int stop) {
    Floats sum = {};
    int t = first;
    for (; t + W <= stop; t += W) sum += load(x + t);
    float found = total(sum);
    for (; t < stop; t++) found += x[t];
    return found < 1e-9f ? 0 : 1 / found;
}

// The weights that a table's entries become: those of a token's codes are multiplied.
void weigh_table(float *table, int sums) { weigh<true>(table, 0, sums, largest_of(table, 0, sums)); }

// A head's scores by the weights of its tokens, which lie in place of logits. Where no token has the largest
// entries of its tables, weights may vanish beside these: they are made again by the tables' sums.
template <class Code>
void by_weight(const Choice &c, int head, const Indexed &sums) {
    float factors[c.group];
    bool vanish = false;
    for (int g = 0; g < c.group; g++) {
        factors[g] = factor_of(sums.out + g * sums.out_query, c.first, c.tokens);
        vanish |= factors[g] == 0;
    }
    if (vanish) codes<Code, false>(sums, c.first, c.tokens);
    for (int g = 0; vanish && g < c.group; g++) {
        float *const x = sums.out + g * sums.out_query;
        factors[g] = 1 / weigh<true>(x, c.first, c.tokens, largest_of(x, c.first, c.tokens));
    }
    float *const scores = c.scores + head * c.scores_row;
    reduce(sums.out, sums.out_query, factors, c.group, c.reduce, c.first, c.tokens, scores);
}

// What a query's choice and the newest tokens weigh of all.
void weigh_choice(const Choice &c, int query) {
    const int head = query / c.group, newest = c.tokens - c.newest;
    float *x = c.logits + query * c.logits_row, some[W];
    const float top = largest_of(x, c.first, c.tokens);
    const int32_t *chosen = c.out + (long)head * c.most;
    float read = weigh<false>(x, newest > 0 ? newest : 0, c.tokens, top);
    for (int i = 0; i < c.counts[head]; i += W) {
        const int count = c.counts[head] - i < W ? c.counts[head] - i : W;
        for (int j = 0; j < count; j++) some[j] = x[chosen[i + j]];
        read += weigh<false>(some, 0, count, top);
    }
    c.weights[query] = read / weigh<false>(x, c.first, c.tokens, top);
}

// ---------------------------------------------------------------- the choice

void largest_scores(const Choice &c, int choice) {
    const int32_t zero = 0;
    float *scores = c.scores + choice * c.scores_row;
    for (int t = 0; t < c.first; t++) scores[t] = INFINITY;
    omnikv_topk(scores, 0, 1, c.tokens > c.first ? c.tokens : c.first, &zero, c.stop + choice, c.room + choice,
                c.out + (long)choice * c.most, c.most, c.counts + choice);
}

// score(head) is run before, where that is still to be done.
template <class Score>
void choose_all(const Choice &c, int unscored, const Score &score) {
    const int choices = c.reduce == NONE ? c.heads * c.group : c.heads, work = c.heads * c.group;
    share(c.threads, unscored, 1, score);
    share(c.threads, choices, 1, [&](int i) { largest_scores(c, i); });
    if (c.weights) share(c.threads, work, 1, [&](int i) { weigh_choice(c, i); });
}

// Runs part(head, first, stop) over pieces of all tokens of all heads.
template <class Part>
void in_parts(const Choice &c, const Part &part) {
    const int parts = c.tokens > c.first ? (c.tokens - c.first + PART - 1) / PART : 0, work = parts * c.heads;
    share(c.threads, work, 1, [&](int i) {
        const int first = c.first + i % parts * PART;
        part(i / parts, first, first + PART < c.tokens ? first + PART : c.tokens);
    });
}

template <class K>
int by_channels(const Choice &c, const float *given, const int64_t *rows) {
    in_parts(c, [&](int head, int first, int stop) {
        const bool apart = c.reduce == NONE && !c.logits;
        const long row = apart ? c.scores_row : c.logits_row;
        float *out = (apart ? c.scores : c.logits) + head * c.group * row, *to = c.scores + head * c.scores_row;
        channels<K>({given + (long)head * c.group * c.terms, rows + (long)head * c.terms,
                     c.index + head * c.index_head, c.index_row, out, row, c.group, c.terms, 0},
                    first, stop);
        if (!apart) reduce(out, row, nullptr, c.group, c.reduce, first, stop, to);
    });
    choose_all(c, 0, [](int) {});
    return 0;
}

// Weights rank where there is room for logits, else the one table that a group's are reduced to.
template <class Code>
int by_codes(const Choice &c, const float *tables, const float *weights) {
    const int group = c.logits ? c.group : 1;
    const long row = c.logits ? c.logits_row : c.scores_row, size = (long)c.terms * group * table_row(c.sums);
    float *const out = c.logits ? c.logits : c.scores;
    auto of = [&](int head, const float *tables) {
        return Indexed{tables + head * size, nullptr, c.index + head * c.index_head, c.index_row,
                       out + head * group * row, row, group, c.terms, c.sums};
    };
    in_parts(c, [&](int head, int first, int stop) {
        if (c.logits) codes<Code, true>(of(head, weights), first, stop);
        else codes<Code, false>(of(head, tables), first, stop);
    });
    choose_all(c, c.logits ? c.heads : 0, [&](int head) { by_weight<Code>(c, head, of(head, tables)); });
    return 0;
}

}  // namespace

// Returns 0, 1 for a kind that this build lacks, 2 without memory.
extern "C" int omnikv_choose_by_channels(const Choice *given) {
    const Choice &c = *given;
    static thread_local Scratch scratch;
    const long queries = (long)c.heads * c.group;
    float *const q = (float *)scratch.get(
        sizeof(float) * (queries * (c.dim + c.terms) + 2 * c.dim) + sizeof(int64_t) * (c.heads * c.terms + 1));
    if (!q) return 2;
    if (widened(c, q)) return 1;
    float *const sizes = q + queries * c.dim, *const parts = sizes + 2 * c.dim;
    int64_t *const rows = (int64_t *)(((uintptr_t)(parts + queries * c.terms) + 7) & ~(uintptr_t)7);
    for (int h = 0; h < c.heads; h++)
        parts_of(c, h, q + (long)h * c.group * c.dim, sizes, parts + (long)h * c.group * c.terms,
                 rows + (long)h * c.terms);
#define BY_CHANNELS(K) by_channels<K>(c, parts, rows)
    OF_KIND(c.index_kind, BY_CHANNELS);
}

// index_kind: bytes of a code.
extern "C" int omnikv_choose_by_codes(const Choice *given) {
    const Choice &c = *given;
    static thread_local Scratch scratch;
    const long queries = (long)c.heads * c.group, row = table_row(c.sums), held = queries * c.terms * row;
    float *const found = (float *)scratch.get(sizeof(float) * (2 * held + queries * c.dim));
    if (!found) return 2;
    float *const weights = found + held, *const q = weights + held;
    if (widened(c, q)) return 1;
    for (int h = 0; h < c.heads; h++) {
        float *const own = found + h * c.group * c.terms * row;
        if (tables(c, h, q + (long)h * c.group * c.dim, own)) return 1;
        if (!c.logits) reduce(own, row, nullptr, c.group, c.reduce, 0, row, found + h * row);
    }
    if (c.logits) memcpy(weights, found, sizeof(float) * held);
    for (long i = 0; c.logits && i < queries * c.terms; i++) weigh_table(weights + i * row, c.sums);
    if (c.index_kind == 1) return by_codes<uint8_t>(c, found, weights);
    return c.index_kind == 4 ? by_codes<int32_t>(c, found, weights) : 1;
}

namespace {

// A step of one layer: what is bound to the layer, and what is the step's own.
struct Layer {
    const Learnt *learnt[2];  // what learns the newest token, whose `row` is the first of all; NULL: nothing
    Choice *choice;
    Call *attention;     // to what is chosen, of which all lists take as many, and to a tail
    const float *means;  // [heads][dim]: what has the weight that a choice leaves, or NULL
    int learns[2];       // of LEARNS
    int by_codes, kind, q_kind;
    // of the step
    int learning, tokens, ranked, start, newest, known, threads;
    const int32_t *stop, *room;
    const char *q;
    char *out;
};

enum { CHANNELS, CODE, VALUE };  // LEARNS of kernels/index/step.py

int learn(const Layer &c) {
    for (int i = 0; i < 2 && c.learnt[i]; i++) {
        Learnt now = *c.learnt[i];
        now.token = c.tokens - 1, now.row += now.token * now.row_token;
        const int fault = c.learns[i] == CHANNELS ? omnikv_learn_channels(&now)
                          : c.learns[i] == CODE   ? omnikv_learn_code(&now)
                                                  : omnikv_add_value(&now);
        if (fault) return fault;
    }
    return 0;
}

// out [heads * group][dim] becomes the mean, as far as it has no weight; as torch's lerp rounds.
template <class K>
void complete(const Choice &c, const float *means, char *out) {
    for (int r = 0; r < c.heads * c.group; r++)
        for (int d = 0; d < c.dim; d += W) {
            const int count = c.dim - d < W ? c.dim - d : W;
            const float weight = c.weights[r];
            const Floats mean = read_some<Float32>(means + (long)(r / c.group) * c.dim, d, count);
            const Floats x = read_some<K>(out, (long)r * c.dim + d, count), apart = x - mean;
            write_some<K>(out, (long)r * c.dim + d, count,
                          weight < .5f ? mean + apart * weight : x - apart * (1 - weight));
        }
}

int completed(const Layer &c) {
#define COMPLETE(K) (complete<K>(*c.choice, c.means, c.out), 0)
    OF_KIND(c.q_kind, COMPLETE);
}

}  // namespace

// The newest token is learnt, the choice made, and attended to. Returns as the others.
extern "C" int omnikv_choose_and_attend(const Layer *given) {
    const Layer &c = *given;
    Choice &choice = *c.choice;
    Call &call = *c.attention;
    if (c.learning)
        if (const int fault = learn(c)) return fault;
    choice.q = c.q, choice.q_kind = c.q_kind, choice.tokens = c.ranked, choice.threads = c.threads;
    choice.newest = c.newest, choice.stop = c.stop, choice.room = c.room;
    if (c.by_codes) choice.sums = c.known;
    if (const int fault = c.by_codes ? omnikv_choose_by_codes(&choice) : omnikv_choose_by_channels(&choice))
        return fault;
    call.kept = choice.counts[0], call.start = c.start, call.visited = call.kept + c.tokens - c.start;
    call.threads = c.threads;
    if (const int fault = omnikv_attend_heads(&call, c.kind, c.q, c.out, c.q_kind)) return fault;
    return c.means ? completed(c) : 0;
}

extern "C" int omnikv_sizeof_layer() { return sizeof(Layer); }

extern "C" int omnikv_sizeof_choice() { return sizeof(Choice); }
