// Attention of a query to the rows that it has drawn, each for those that were not, and to the newest
// (kernels/sketch/drawn.py): a row counts for one over the probability with which it is drawn.
#include "attention.h"
#include "scratch.h"

namespace {

struct Drawn {  // strides in bytes, but for lists and what is drawn: elements
    const float *q;      // [heads * group][dim]
    const float *means;  // [heads][dim], of keys
    const char *k, *v;
    long key_head, key_row, value_head, value_row;
    const int32_t *index, *counts;  // [heads][..] and [heads]
    long index_head;
    const uint8_t *drawn;  // [heads][group][..]: which of a list a query has drawn
    long drawn_head, drawn_query;
    float *out;  // [heads * group][dim]
    int heads, group, dim, first, stop, sink, bits, tables, threads;
    float scale, least;
};

constexpr int MOST_GROUP = 128;  // queries of a K/V head

double power(double base, int times) {
    double found = 1;
    for (; times; times >>= 1, base *= base)
        if (times & 1) found *= base;
    return found;
}

// The log of the probability that rows whose angle has this cosine agree in two tables or more.
float log_chance(const Drawn &c, float cosine) {
    const double clamped = cosine < -1 ? -1 : cosine > 1 ? 1 : cosine;
    const double table = power(1 - acos(clamped) / M_PI, c.bits);  // small chances are small differences
    const double others = power(1 - table, c.tables - 1);
    return logf((float)(1 - others * (1 - table) - c.tables * table * others) + c.least);
}

// Rows of a block less their mean: rows [count][dim], and their lengths.
template <class K>
void centre(const Block &block, int count, const float *mean, int dim, float *rows, float *lengths) {
    for (int t = 0; t < count; t += W) {
        alignas(64) Floats squares[W] = {};
        for (int i = 0; i < W && t + i < count; i++)
            for (int d = 0; d < dim; d += W) {
                const Floats x = K::read(block.keys[t + i], d) - load(mean + d);
                store(rows + (long)(t + i) * dim + d, x);
                squares[i] += x * x;
            }
        const Floats sums = totals(squares);
        for (int i = 0; i < W && t + i < count; i++) lengths[t + i] = sqrtf(sums[i]);
    }
}

// One K/V head. rows: room for BLOCK centred keys.
template <class K>
void attend_drawn(const Drawn &c, int head, float *rows) {
    const int listed_rows = c.counts[head], all_rows = listed_rows + c.stop - c.first;
    const Run run = {c.k + head * c.key_head, c.v + head * c.value_head, c.key_row, c.value_row,
                     c.index + head * c.index_head, listed_rows, c.first, 1};
    alignas(64) float lengths[BLOCK], logs[BLOCK], products[BLOCK];
    const char *centred[BLOCK + AHEAD];
    float best[MOST_GROUP], sum[MOST_GROUP], size[MOST_GROUP];
    const float *q = c.q + (long)head * c.group * c.dim;
    float *out = c.out + (long)head * c.group * c.dim;
    memset(out, 0, sizeof(float) * c.group * c.dim);
    for (int g = 0; g < c.group; g++) {
        Floats squares = {};
        for (int d = 0; d < c.dim; d += W) squares += load(q + g * c.dim + d) * load(q + g * c.dim + d);
        best[g] = -INFINITY, sum[g] = 0, size[g] = sqrtf(total(squares));
    }
    for (int from = 0; from < all_rows; from += BLOCK) {
        const Block block(run, from, all_rows);
        int chosen = listed_rows - from;
        chosen = chosen < 0 ? 0 : chosen < block.count ? chosen : block.count;
        centre<K>(block, chosen, c.means + (long)head * c.dim, c.dim, rows, lengths);
        for (int i = 0; chosen && i < listed(chosen); i++)
            centred[i] = (const char *)(rows + (long)(i < chosen ? i : chosen - 1) * c.dim);
        for (int g = 0; g < c.group; g++) {
            const uint8_t *drawn = c.drawn + head * c.drawn_head + g * c.drawn_query + from;
            if (chosen) logits_of<Float32, 1>(q + g * c.dim, centred, chosen, c.dim, products);
            for (int i = 0; i < chosen; i++) {
                const float both = lengths[i] * size[g], cosine = products[i] / (both > 1e-30f ? both : 1e-30f);
                logs[i] = !drawn[i] ? -INFINITY : from + i < c.sink ? 0 : -log_chance(c, cosine);
            }
            for (int i = chosen; i < block.count; i++) logs[i] = 0;
            attend_tile<K, K, 1>(q + g * c.dim, block, c.dim, c.scale, 0, logs, &all_rows, out + g * c.dim,
                                 best + g, sum + g, nullptr, 0);
        }
    }
    for (int g = 0; g < c.group; g++)
        for (int d = 0; d < c.dim; d += W) store(out + g * c.dim + d, load(out + g * c.dim + d) / sum[g]);
}

template <class K>
int all_heads(const Drawn &c) {
    static thread_local Scratch scratch;
    if (c.group > MOST_GROUP) return 1;
    float *rows = (float *)scratch.get(sizeof(float) * BLOCK * c.dim * c.heads);
    if (!rows) return 2;
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1 && c.heads > 1)
    for (int head = 0; head < c.heads; head++) attend_drawn<K>(c, head, rows + (long)head * BLOCK * c.dim);
    return 0;
}

}  // namespace

// kind: of kinds.h, of K and V. Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_attend_drawn(const Drawn *c, int kind) {
#define ATTEND_DRAWN(K) all_heads<K>(*c)
    OF_KIND(kind, ATTEND_DRAWN);
}

extern "C" int omnikv_sizeof_drawn() { return sizeof(Drawn); }
