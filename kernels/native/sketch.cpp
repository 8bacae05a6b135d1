// What stands for tokens or pages in few channels, met by the queries of a group together, and the choice by
// it: guesses of logits (kernels/sketch/guesses.py) and bounds on them (kernels/sketch/channel_bounds.py).
#include "indexed.h"
#include "scratch.h"
#include "team.h"

extern "C" void omnikv_topk(const float *scores, long stride, int rows, int columns, const int32_t *lo,
                            const int32_t *hi, const int32_t *k, int32_t *out, int room, int32_t *counts);

namespace {

enum { MAX, MEAN, SUM };

// Joins what a query gives vector t of a group's scores.
INLINE Floats joined(Floats before, Floats x, bool first, int how) {
    if (first) return x;
    return how == MAX ? most(before, x) : before + x;
}

template <class K>
void widen(const char *from, long count, float *to) {
    for (long i = 0; i < count; i += W) {
        const int some = count - i < W ? (int)(count - i) : W;
        write_some<Float32>(to, i, some, read_some<K>(from, i, some));
    }
}

// As the kinds of vector.h number them.
bool widen(int kind, const char *from, long count, float *to) {
    if (kind == FLOAT32) widen<Float32>(from, count, to);
    else if (kind == BFLOAT16) widen<BFloat16>(from, count, to);
#if defined(HAS_FLOAT16)
    else if (kind == FLOAT16) widen<Float16>(from, count, to);
#endif
    else return false;
    return true;
}

// ---------------------------------------------------------------- guesses

struct Guess {  // strides in bytes of columns and rows, else in elements
    const char *row;  // queries [heads * group][dim], or a token's K of each head: of row_kind
    long row_head;
    const float *skew;  // [heads][dim][columns]
    char *held;         // [heads][columns][..], of `kind`
    long held_head, held_column;
    float *logits;  // [heads * group][..]
    long logit_query;
    float *scores;  // [heads][..]
    long score_head;
    const int32_t *stop, *room;  // [heads]: the tokens below `stop` compete for as many places at most
    int32_t *out, *counts;       // [heads][most], [heads]
    int heads, group, dim, columns, tokens, token, most, how, kind, row_kind, threads;
    float scale, alpha;
};

// A row [dim] times a head's skew: [columns].
void project(const Guess &c, int head, const float *row, float scale, float *to) {
    const float *skew = c.skew + (long)head * c.dim * c.columns;
    for (int i = 0; i < c.columns; i += W) {
        const int count = c.columns - i < W ? c.columns - i : W;
        Floats sum = {};
        for (int d = 0; d < c.dim; d++) sum += read_some<Float32>(skew + (long)d * c.columns, i, count) * row[d];
        store_some(to + i, count, sum * scale);
    }
}

// How far each token's logit is below the largest of its query, few [group][columns]; how many of a head's are
// less than alpha below.
template <class K>
int guess(const Guess &c, int head, const float *few, const int64_t *numbers) {
    float *const logits = c.logits + (long)head * c.group * c.logit_query, *const scores = c.scores + head * c.score_head;
    channels<K>({few, numbers, c.held + head * c.held_head, c.held_column, logits, c.logit_query, c.group,
                 c.columns, 0},
                0, c.tokens);
    int found = 0;
    for (int g = 0; g < c.group; g++) {
        const float *const x = logits + g * c.logit_query;
        Floats tops = all(-INFINITY);
        int t = 0;
        for (; t + W <= c.tokens; t += W) tops = most(load(x + t), tops);
        float top = largest(tops);
        for (; t < c.tokens; t++) top = x[t] > top ? x[t] : top;
        Ints near = {};
        const bool last = g == c.group - 1;
        for (t = 0; t < c.tokens; t += W) {
            const int count = c.tokens - t < W ? c.tokens - t : W;
            Floats score = joined(read_some<Float32>(scores, t, count), read_some<Float32>(x, t, count) - top, !g, c.how);
            if (last && c.how == MEAN) score /= (float)c.group;
            store_some(scores + t, count, score);
            if (count == W) near -= (Ints)(score > -c.alpha);
            else
                for (int i = 0; last && i < count; i++) found += score[i] > -c.alpha;
        }
        for (int i = 0; last && i < W; i++) found += near[i];
    }
    return found;
}

template <class K>
int choose_guessed(const Guess &c) {
    static thread_local Scratch scratch;
    const long queries = (long)c.heads * c.group;
    int64_t *const numbers = (int64_t *)scratch.get(sizeof(int64_t) * c.columns +
                                                    sizeof(float) * queries * (c.dim + c.columns));
    if (!numbers) return 2;
    float *const few = (float *)(numbers + c.columns), *const q = few + queries * c.columns;
    for (int i = 0; i < c.columns; i++) numbers[i] = i;
    if (!widen(c.row_kind, c.row, queries * c.dim, q)) return 1;
    for (long i = 0; i < queries; i++) project(c, (int)(i / c.group), q + i * c.dim, c.scale, few + i * c.columns);
    std::atomic<int> sum{0};
    share(c.threads, c.heads, 1,
          [&](int head) { sum += guess<K>(c, head, few + (long)head * c.group * c.columns, numbers); });
    const int found = sum;
    const int32_t zero = 0;
    for (int head = 0; head < c.heads; head++) {
        int32_t wanted = found / c.heads > 1 ? found / c.heads : 1;
        const int32_t room = c.room[head] > 1 ? c.room[head] : 1;
        wanted = wanted < room ? wanted : room;
        omnikv_topk(c.scores + head * c.score_head, 0, 1, c.tokens, &zero, c.stop + head, &wanted,
                    c.out + (long)head * c.most, c.most, c.counts + head);
    }
    return 0;
}

template <class K>
int learn_guessed(const Guess &c) {
    static thread_local Scratch scratch;
    float *const row = (float *)scratch.get(sizeof(float) * (c.dim + c.columns));
    if (!row) return 2;
    for (int head = 0; head < c.heads; head++) {
        if (!widen(c.row_kind, c.row + head * c.row_head, c.dim, row)) return 1;
        project(c, head, row, 1, row + c.dim);
        for (int i = 0; i < c.columns; i++)
            write_some<K>(c.held + head * c.held_head + i * c.held_column, c.token, 1, all(row[c.dim + i]));
    }
    return 0;
}

// ---------------------------------------------------------------- bounds of pages

struct Bounds {  // strides in bytes of extremes, else in elements
    const float *few;         // [heads][group][count]
    const int64_t *channels;  // [heads][count]
    const char *low, *high;   // [heads][dim][..]
    long head, channel;
    float *out;  // [heads][..]
    long out_head;
    int heads, group, count, pages, how, threads;
};

// W bounds from page t on, of which `pages` are there.
template <class K>
INLINE Floats extreme(const char *row, int t, int pages) {
    if (pages >= W) return K::read(row, t);
    alignas(64) char some[W * 4] = {};
    memcpy(some, row + (long)t * K::bytes, (long)K::bytes * pages);
    return K::read(some, 0);
}

template <class K, int T>
INLINE void bound_some(const Bounds &c, int head, int g, int t, int pages, Floats *found) {
    const float *few = c.few + ((long)head * c.group + g) * c.count;
    const int64_t *channels = c.channels + (long)head * c.count;
    Floats sums[T] = {};
    for (int i = 0; i < c.count; i++) {
        const long at = head * c.head + channels[i] * c.channel;
        const Floats low = extreme<K>(c.low + at, t, pages), high = extreme<K>(c.high + at, t, pages);
        for (int r = 0; r < T; r++) {
            const float x = few[r * c.count + i];
            sums[r] += (x > 0 ? high : low) * x;
        }
    }
    for (int r = 0; r < T; r++) *found = joined(*found, sums[r], !(g + r), c.how);
}

template <class K>
void bound_pages(const Bounds &c, int head) {
    for (int t = 0; t < c.pages; t += W) {
        const int pages = c.pages - t < W ? c.pages - t : W;
        Floats found = {};
        int g = 0;
        for (; g + TILE <= c.group; g += TILE) bound_some<K, TILE>(c, head, g, t, pages, &found);
        for (; g + 2 <= c.group; g += 2) bound_some<K, 2>(c, head, g, t, pages, &found);
        for (; g < c.group; g++) bound_some<K, 1>(c, head, g, t, pages, &found);
        if (c.how == MEAN) found /= (float)c.group;
        memcpy(c.out + head * c.out_head + t, &found, sizeof(float) * pages);
    }
}

template <class K>
int channel_bounds(const Bounds &c) {
    share(c.threads, c.heads, 1, [&](int head) { bound_pages<K>(c, head); });
    return 0;
}

struct Paged {
    Bounds bounds;          // few and channels are of no matter
    const char *q;          // [heads * group][dim], of q_kind
    const int32_t *stayed;  // [heads][..]: where the first `kept` rows of pages stand; strides in elements
    long stayed_head;
    int32_t *chosen;  // [heads][..]
    long chosen_head;
    int dim, page, kept, later, room;  // a row from `kept` on stands at its number + later; room: pages
    int kind, q_kind;
};

// A head's `count` channels in which its queries q [group][dim] are largest together, ascending, and its
// queries there: [group][count].
void largest_channels(const float *q, int group, int dim, int count, float *sizes, int64_t *channels, float *few) {
    const int32_t zero = 0;
    int32_t *const largest = (int32_t *)(sizes + dim);
    int32_t found;
    for (int d = 0; d < dim; d++) {
        sizes[d] = 0;
        for (int g = 0; g < group; g++) sizes[d] += fabsf(q[g * dim + d]);
    }
    omnikv_topk(sizes, dim, 1, dim, &zero, &dim, &count, largest, count, &found);
    for (int i = 0; i < count; i++) channels[i] = largest[i];
    for (int g = 0; g < group; g++)
        for (int i = 0; i < count; i++) few[g * count + i] = q[g * dim + largest[i]];
}

template <class K>
void choose_pages(const Paged &p, Bounds c, int head, const float *q, float *sizes, int64_t *channels, float *few) {
    const long own = (long)head * c.group;
    channels += (long)head * c.count, few += own * c.count;
    largest_channels(q + own * p.dim, c.group, p.dim, c.count, sizes, channels, few);
    bound_pages<K>(c, head);
    int32_t *const to = p.chosen + head * p.chosen_head, *const pages = (int32_t *)sizes;
    const int32_t zero = 0;
    int32_t found;
    const int32_t *const stayed = p.stayed + head * p.stayed_head;
    omnikv_topk(c.out + head * c.out_head, 0, 1, c.pages, &zero, &c.pages, &p.room, pages, p.room, &found);
    for (int i = 0; i < found; i++)
        for (int t = 0; t < p.page; t++) {
            const int row = pages[i] * p.page + t;
            to[i * p.page + t] = row < p.kept ? stayed[row] : row + p.later;
        }
}

template <class K>
int all_pages(const Paged &p) {
    static thread_local Scratch scratch;
    Bounds c = p.bounds;
    const long queries = (long)c.heads * c.group, each = (p.room > 2 * p.dim ? p.room : 2 * p.dim) + 16;
    int64_t *const channels = (int64_t *)scratch.get(
        sizeof(int64_t) * c.heads * c.count + sizeof(float) * (queries * (p.dim + c.count) + c.heads * each));
    if (!channels) return 2;
    float *const few = (float *)(channels + (long)c.heads * c.count), *const q = few + queries * c.count;
    float *const sizes = q + queries * p.dim;
    c.few = few, c.channels = channels;
    if (!widen(p.q_kind, p.q, queries * p.dim, q)) return 1;
    share(c.threads, c.heads, 1,
          [&](int head) { choose_pages<K>(p, c, head, q, sizes + head * each, channels, few); });
    return 0;
}

}  // namespace

// Each returns 0, 1 for a kind that this build lacks, or 2 without memory; kind: of kinds.h, of rows.
extern "C" int omnikv_choose_guessed(const Guess *c) {
#define CHOOSE_GUESSED(K) choose_guessed<K>(*c)
    OF_KIND(c->kind, CHOOSE_GUESSED);
}

extern "C" int omnikv_learn_guessed(const Guess *c) {
#define LEARN_GUESSED(K) learn_guessed<K>(*c)
    OF_KIND(c->kind, LEARN_GUESSED);
}

extern "C" int omnikv_channel_bounds(const Bounds *c, int kind) {
#define CHANNEL_BOUNDS(K) channel_bounds<K>(*c)
    OF_KIND(kind, CHANNEL_BOUNDS);
}

extern "C" int omnikv_choose_bounded(const Paged *p) {
#define ALL_PAGES(K) all_pages<K>(*p)
    OF_KIND(p->kind, ALL_PAGES);
}

extern "C" int omnikv_sizeof_guess() { return sizeof(Guess); }
extern "C" int omnikv_sizeof_bounds() { return sizeof(Bounds); }
extern "C" int omnikv_sizeof_paged() { return sizeof(Paged); }
