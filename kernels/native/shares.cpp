// Which share of a query's attention falls on each chunk by its landmark, for the query heads of a K/V head
// together (kernels/sketch/shares.py).
#include "attention.h"
#include "scratch.h"

namespace {

struct Shares {  // strides in bytes of landmarks, else in elements
    const float *q;      // [heads * group][dim]
    const char *marks;   // [heads][count][dim]
    long mark_head, mark_row;
    const int64_t *aside;  // [heads][held]: chunks that do not compete
    long aside_head;
    float *scores;  // [heads][count]
    long score_head;
    int heads, group, dim, count, held, how, threads;
    float scale, cap;
};

enum { MAX, MEAN, SUM };

// Logits of T queries with all landmarks of a head: l [T][count].
template <class K, int T>
void logits_with(const Shares &c, const char *marks, const float *q, float *l) {
    const char *rows[BLOCK + AHEAD];
    alignas(64) float some[T * BLOCK];
    for (int first = 0; first < c.count; first += BLOCK) {
        const int count = first + BLOCK < c.count ? BLOCK : c.count - first;
        for (int i = 0; i < listed(count); i++)
            rows[i] = marks + (long)(first + i < c.count ? first + i : c.count - 1) * c.mark_row;
        logits_of<K, T>(q, rows, count, c.dim, some);
        for (int r = 0; r < T; r++)
            memcpy(l + (long)r * c.count + first, some + r * BLOCK, sizeof(float) * count);
    }
}

// Their softmax joins the scores.
void join(const Shares &c, const int64_t *aside, bool first, float *l, float *scores) {
    const int whole = c.count / W * W;
    for (int i = 0; i < whole; i += W) {
        const Floats x = load(l + i) * c.scale;
        store(l + i, c.cap ? capped(x, c.cap) : x);
    }
    for (int i = whole; i < c.count; i++) {
        const Floats x = all(l[i] * c.scale);
        l[i] = (c.cap ? capped(x, c.cap) : x)[0];
    }
    for (int i = 0; i < c.held; i++) l[aside[i]] = -INFINITY;
    float top = -INFINITY, sum = 0;
    for (int i = 0; i < c.count; i++) top = l[i] > top ? l[i] : top;
    const float base = top == -INFINITY ? 0 : top;
    Floats sums = {};
    for (int i = 0; i < whole; i += W) {
        const Floats weight = exponential(load(l + i) - base);
        store(l + i, weight), sums += weight;
    }
    for (int i = whole; i < c.count; i++) l[i] = exponential(all(l[i] - base))[0], sum += l[i];
    sum += total(sums);
    for (int i = 0; i < c.count; i++) {
        const float share = l[i] / sum;
        if (first) scores[i] = share;
        else if (c.how == MAX) scores[i] = share > scores[i] ? share : scores[i];
        else scores[i] += share;
    }
}

template <class K>
void shares_of(const Shares &c, int head, float *l) {
    const char *marks = c.marks + head * c.mark_head;
    const int64_t *aside = c.aside + head * c.aside_head;
    float *scores = c.scores + head * c.score_head;
    for (int g = 0; g < c.group;) {
        const float *q = c.q + ((long)head * c.group + g) * c.dim;
        const int left = c.group - g, some = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (some == 4) logits_with<K, 4>(c, marks, q, l);
        else if (some == 2) logits_with<K, 2>(c, marks, q, l);
        else logits_with<K, 1>(c, marks, q, l);
        for (int r = 0; r < some; r++) join(c, aside, !(g + r), l + (long)r * c.count, scores);
        g += some;
    }
    for (int i = 0; c.how == MEAN && i < c.count; i++) scores[i] /= c.group;
    for (int i = 0; i < c.held; i++) scores[aside[i]] = -INFINITY;
}

template <class K>
int all_shares(const Shares &c) {
    static thread_local Scratch scratch;
    const long each = 4L * c.count;
    float *l = (float *)scratch.get(sizeof(float) * each * c.heads);
    if (!l) return 2;
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1 && c.heads > 1)
    for (int head = 0; head < c.heads; head++) shares_of<K>(c, head, l + head * each);
    return 0;
}

}  // namespace

// kind: of kinds.h, of landmarks. Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_shares(const Shares *c, int kind) {
#define ALL_SHARES(K) all_shares<K>(*c)
    OF_KIND(kind, ALL_SHARES);
}

extern "C" int omnikv_sizeof_shares() { return sizeof(Shares); }
