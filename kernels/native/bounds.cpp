// Pages of K by their elementwise extremes: kept up to date, bounded for a query, and the largest chosen
// (kernels/select/page_bounds.py). What chooses is topk.cpp.
#include "rounding.h"
#include "team.h"

extern "C" void omnikv_topk(const float *scores, long stride, int rows, int columns, const int32_t *lo,
                            const int32_t *hi, const int32_t *k, int32_t *out, int room, int32_t *counts);

namespace {

struct Pages {  // strides in bytes, but for those of bounds, pages and counts, which count elements
    const float *most, *least;  // [heads * group][dim]: the query's parts above and below 0
    const char *k;
    long key_head, key_row;
    char *low, *high;  // [heads][..][dim], pages without gaps
    long page_head;
    float *bounds;  // [heads][..]
    long bound_head;
    int32_t *pages;  // [heads][room]
    int32_t *counts;  // [heads]
    int heads, group, dim, size, known, length, how, wanted, room, threads;
};

enum { MOST, MEAN, SUM };
constexpr int TILE = 4;  // queries that read a page's extremes together

// The extremes of rows first .. stop - 1 of one head; not a number where one is.
template <class K>
void learn(const char *k, long key_row, int first, int stop, int dim, char *low, char *high) {
    for (int d = 0; d < dim; d += W) {
        Floats least = K::read(k + first * key_row, d), most = least;
        for (int row = first + 1; row < stop; row++) {
            const Floats x = K::read(k + row * key_row, d);
            least = ((x < least) | (x != x)) ? x : least;
            most = ((x > most) | (x != x)) ? x : most;
        }
        write_some<K>(low, d, W, least), write_some<K>(high, d, W, most);
    }
}

// Bounds of pages t .. t + count - 1, W at most, under T queries: found[T].
template <class K, int T>
INLINE void bound_some(const float *most, const float *least, const char *low, const char *high, int count,
                       int dim, Floats *found) {
    Floats sums[T][W] = {};
    const long row = (long)dim * K::bytes;
    for (int i = 0; i < count; i++) {
        Floats s[T] = {};
        for (int d = 0; d < dim; d += W) {
            const Floats top = K::read(high + i * row, d), bottom = K::read(low + i * row, d);
            for (int r = 0; r < T; r++)
                s[r] += top * load(most + r * dim + d) + bottom * load(least + r * dim + d);
        }
        for (int r = 0; r < T; r++) sums[r][i] = s[r];
    }
    for (int r = 0; r < T; r++) found[r] = totals(sums[r]);
}

template <class K>
void bound(const Pages &c, int head, int pages) {
    const long row = (long)c.dim * K::bytes;
    const char *low = c.low + head * c.page_head, *high = c.high + head * c.page_head;
    const float *most = c.most + (long)head * c.group * c.dim;
    const float *least = c.least + (long)head * c.group * c.dim;
    float *const to = c.bounds + head * c.bound_head;
    for (int t = 0; t < pages; t += W) {
        const int count = pages - t < W ? pages - t : W;
        Floats whole = {};
        for (int g = 0; g < c.group;) {
            Floats found[TILE];
            const long at = (long)g * c.dim;
            const int tile = c.group - g >= TILE ? TILE : c.group - g >= 2 ? 2 : 1;
#define BOUND(T) bound_some<K, T>(most + at, least + at, low + t * row, high + t * row, count, c.dim, found)
            if (tile == TILE) BOUND(TILE);
            else if (tile == 2) BOUND(2);
            else BOUND(1);
            for (int r = 0; r < tile; r++) {
                const Floats x = found[r];
                if (g + r == 0) whole = x;
                else whole = c.how != MOST ? whole + x : ((x > whole) | (x != x)) ? x : whole;
            }
            g += tile;
        }
        if (c.how == MEAN) whole /= (float)c.group;
        write_some<Float32>(to, t, count, whole);
    }
}

template <class K>
int choose_pages(const Pages &c) {
    const int newest = (c.length - 1) / c.size;
    const int first = (c.known < c.length ? c.known : c.length - 1) / c.size;
    const long row = (long)c.dim * K::bytes;
    share(newest > 4096 ? c.threads : 1, c.heads, 1, [&](int head) {
        char *low = c.low + head * c.page_head, *high = c.high + head * c.page_head;
        for (int page = first; page <= newest; page++) {
            const int from = page * c.size, stop = from + c.size < c.length ? from + c.size : c.length;
            learn<K>(c.k + head * c.key_head, c.key_row, from, stop, c.dim, low + page * row, high + page * row);
        }
        bound<K>(c, head, newest);
        const int32_t none = 0;
        omnikv_topk(c.bounds + head * c.bound_head, 0, 1, newest, &none, &newest, &c.wanted,
                    c.pages + (long)head * c.room, c.room, c.counts + head);
    });
    return 0;
}

}  // namespace

// kind: of kinds.h, of K and of its extremes. Returns 0, or 1 for a kind that this build lacks.
extern "C" int omnikv_choose_pages(const Pages *c, int kind) {
#define CHOOSE(K) choose_pages<K>(*c)
    OF_KIND(kind, CHOOSE);
}

extern "C" int omnikv_sizeof_pages() { return sizeof(Pages); }
