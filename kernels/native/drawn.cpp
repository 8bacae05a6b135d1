// Attention of a query to the rows that it has drawn, each for those that were not, and to the newest
// (kernels/sketch/drawn.py): a row counts for one over the probability with which it is drawn.
#include "attention.h"
#include "scratch.h"
#include "team.h"

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
float log_chance(const Drawn &c, double cosine) {
    const double clamped = cosine < -1 ? -1 : cosine > 1 ? 1 : cosine;
    const double table = power(1 - acos(clamped) / M_PI, c.bits);  // small chances are small differences
    const double others = power(1 - table, c.tables - 1);
    return logf((float)(1 - others * (1 - table) - c.tables * table * others) + c.least);
}

typedef double Wide __attribute__((vector_size(8 * W), aligned(8), may_alias));

// A float64 sum: what is left of an angle near that of opposite rows is a small difference.
double product(const float *one, const float *other, int dim) {
    Wide sums = {};
    for (int d = 0; d < dim; d += W)
        sums += __builtin_convertvector(load(one + d), Wide) * __builtin_convertvector(load(other + d), Wide);
    double found[4] = {};
    for (int i = 0; i < W; i++) found[i % 4] += sums[i];
    return (found[0] + found[1]) + (found[2] + found[3]);
}

// One K/V head. row: room for a key.
template <class K>
void attend_drawn(const Drawn &c, int head, float *row) {
    const int listed_rows = c.counts[head], all_rows = listed_rows + c.stop - c.first;
    const Run run = {c.k + head * c.key_head, c.v + head * c.value_head, c.key_row, c.value_row,
                     c.index + head * c.index_head, listed_rows, c.first, 1};
    const float *q = c.q + (long)head * c.group * c.dim, *mean = c.means + (long)head * c.dim;
    float *out = c.out + (long)head * c.group * c.dim, best[MOST_GROUP], sum[MOST_GROUP];
    double sizes[MOST_GROUP];
    memset(out, 0, sizeof(float) * c.group * c.dim);
    for (int g = 0; g < c.group; g++) {
        best[g] = -INFINITY, sum[g] = 0;
        sizes[g] = sqrt(product(q + g * c.dim, q + g * c.dim, c.dim));
    }
    for (int from = 0; from < all_rows; from += BLOCK) {
        const Block block(run, from, all_rows);
        float *const logs = row + c.dim;  // [group][BLOCK]
        for (int i = 0; i < block.count; i++) {
            const bool chosen = from + i < listed_rows, certain = from + i < c.sink;
            const uint8_t *drawn = c.drawn + head * c.drawn_head + from + i;
            double size = 0;
            for (int g = 0; g < c.group; g++) {
                float &log = logs[g * BLOCK + i] = 0;
                if (!chosen) continue;
                if (!drawn[g * c.drawn_query]) log = -INFINITY;
                else if (!certain) {
                    if (!size) {
                        for (int d = 0; d < c.dim; d += W) store(row + d, K::read(block.keys[i], d) - load(mean + d));
                        size = sqrt(product(row, row, c.dim));
                    }
                    const double both = size * sizes[g];
                    log = -log_chance(c, product(q + g * c.dim, row, c.dim) / (both > 1e-30 ? both : 1e-30));
                }
            }
        }
        for (int g = 0; g < c.group; g++)
            attend_tile<K, K, 1>(q + g * c.dim, block, c.dim, c.scale, 0, logs + g * BLOCK, &all_rows,
                                 out + g * c.dim, best + g, sum + g, nullptr, 0);
    }
    for (int g = 0; g < c.group; g++)
        for (int d = 0; d < c.dim; d += W) store(out + g * c.dim + d, load(out + g * c.dim + d) / sum[g]);
}

template <class K>
int all_heads(const Drawn &c) {
    static thread_local Scratch scratch;
    if (c.group > MOST_GROUP) return 1;
    const long each = c.dim + (long)c.group * BLOCK;
    float *rows = (float *)scratch.get(sizeof(float) * each * c.heads);
    if (!rows) return 2;
    share(c.threads, c.heads, 1, [&](int head) { attend_drawn<K>(c, head, rows + head * each); });
    return 0;
}

}  // namespace

// kind: of kinds.h, of K and V. Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_attend_drawn(const Drawn *c, int kind) {
#define ATTEND_DRAWN(K) all_heads<K>(*c)
    OF_KIND(kind, ATTEND_DRAWN);
}

extern "C" int omnikv_sizeof_drawn() { return sizeof(Drawn); }
