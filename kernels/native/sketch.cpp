// What stands for tokens or pages in few channels, met by the queries of a group together: guesses of logits
// (kernels/sketch/guesses.py) and bounds on them (kernels/sketch/channel_bounds.py).
#include "vector.h"

namespace {

enum { MAX, MEAN, SUM };
constexpr int TILE = 4;  // queries that meet a vector together

// Joins what a query gives vector t of a group's scores.
INLINE Floats joined(Floats before, Floats x, bool first, int how) {
    if (first) return x;
    return how == MAX ? most(before, x) : before + x;
}

struct Guess {  // strides in bytes of rows, else in elements
    const float *few;  // [heads][group][columns]
    const char *rows;  // [heads][tokens][columns], a head's without gaps
    long row_head;
    float *logits;  // [heads][group][..]
    long logit_head, logit_query;
    float *scores;  // [heads][..]
    long score_head;
    int32_t *found;  // [heads]: tokens less than alpha below a head's largest
    int heads, group, columns, tokens, how, threads;
    float alpha;
};

// The last W elements of a row, or all of a shorter one: a vector reads nothing behind it.
template <class K>
INLINE Floats last_of(const char *row, int columns) {
    if (columns >= W) return K::read(row, columns - W);
    alignas(64) char some[W * 4] = {};
    memcpy(some, row, K::bytes * columns);
    return K::read(some, 0);
}

// Logits of T queries; given [T][whole vectors, then one for the end], and the largest of each.
template <class K, int T>
void guess_some(const Guess &c, const char *rows, const float *given, float *out, float *largest_of) {
    const int vectors = (c.columns + W - 1) / W, whole = c.columns / W, wide = vectors * W;
    const long row = (long)c.columns * K::bytes;
    Floats top[T];
    for (int r = 0; r < T; r++) top[r] = all(-INFINITY);
    for (int t = 0; t < c.tokens; t += W) {
        const int count = c.tokens - t < W ? c.tokens - t : W;
        alignas(64) Floats sums[T][W] = {};
        for (int i = 0; i < count; i++) {
            const char *from = rows + (t + i) * row;
            Floats s[T] = {};
            for (int v = 0; v < vectors; v++) {
                const Floats x = v < whole ? K::read(from, v * W) : last_of<K>(from, c.columns);
                for (int r = 0; r < T; r++) s[r] += x * load(given + r * wide + v * W);
            }
            for (int r = 0; r < T; r++) sums[r][i] = s[r];
        }
        for (int r = 0; r < T; r++) {
            const Floats found = totals(sums[r]);
            float *to = out + r * c.logit_query + t;
            if (count == W) store(to, found), top[r] = most(found, top[r]);
            else
                for (int i = 0; i < count; i++) {
                    to[i] = found[i];
                    top[r][0] = found[i] > top[r][0] ? found[i] : top[r][0];
                }
        }
    }
    for (int r = 0; r < T; r++) largest_of[r] = largest(top[r]);
}

constexpr int WIDEST = 1024, GROUP = 128;  // most columns, and queries of a group

template <class K>
void guess(const Guess &c, int head) {
    const int vectors = (c.columns + W - 1) / W, wide = vectors * W, rest = c.columns % W;
    const char *rows = c.rows + head * c.row_head;
    alignas(64) float given[TILE * (WIDEST + W)], tops[GROUP];
    float *logits = c.logits + head * c.logit_head, *scores = c.scores + head * c.score_head;
    for (int g = 0; g < c.group;) {
        const int left = c.group - g, some = left >= TILE ? TILE : left >= 2 ? 2 : 1;
        for (int r = 0; r < some; r++) {
            const float *few = c.few + ((long)head * c.group + g + r) * c.columns;
            float *to = given + r * wide;
            memset(to, 0, sizeof(float) * wide);
            memcpy(to, few, sizeof(float) * (c.columns - rest));
            // the end lies at the last elements of a vector that ends with the row
            const int at = c.columns >= W ? wide - rest : 0;
            if (rest) memcpy(to + at, few + c.columns - rest, sizeof(float) * rest);
        }
        float *out = logits + g * c.logit_query;
        if (some == TILE) guess_some<K, TILE>(c, rows, given, out, tops + g);
        else if (some == 2) guess_some<K, 2>(c, rows, given, out, tops + g);
        else guess_some<K, 1>(c, rows, given, out, tops + g);
        g += some;
    }
    int found = 0;
    for (int t = 0; t < c.tokens; t++) {
        float score = 0;
        for (int g = 0; g < c.group; g++) {
            const float below = logits[g * c.logit_query + t] - tops[g];
            score = !g ? below : c.how == MAX ? (below > score ? below : score) : score + below;
        }
        if (c.how == MEAN) score /= c.group;
        scores[t] = score, found += score > -c.alpha;
    }
    c.found[head] = found;
}

template <class K>
int guesses(const Guess &c) {
    if (c.columns > WIDEST || c.group > GROUP) return 1;
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1 && c.heads > 1)
    for (int head = 0; head < c.heads; head++) guess<K>(c, head);
    return 0;
}

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
int channel_bounds(const Bounds &c) {
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1 && c.heads > 1)
    for (int head = 0; head < c.heads; head++)
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
    return 0;
}

}  // namespace

// kind: of kinds.h, of rows. Each returns 0, or 1 for a kind that this build lacks.
extern "C" int omnikv_guesses(const Guess *c, int kind) {
#define GUESSES(K) guesses<K>(*c)
    OF_KIND(kind, GUESSES);
}

extern "C" int omnikv_channel_bounds(const Bounds *c, int kind) {
#define CHANNEL_BOUNDS(K) channel_bounds<K>(*c)
    OF_KIND(kind, CHANNEL_BOUNDS);
}

extern "C" int omnikv_sizeof_guess() { return sizeof(Guess); }
extern "C" int omnikv_sizeof_bounds() { return sizeof(Bounds); }
