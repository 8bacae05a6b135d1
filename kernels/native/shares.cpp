// Which share of a query's attention falls on each chunk by its landmark (kernels/sketch/shares.py), or on
// each token by its code, and the tokens whose codes have most (kernels/sketch/codes.py): for the query heads of
// a K/V head together.
#include "attention.h"
#include "rounding.h"
#include "scratch.h"
#include "team.h"
#include "turn.h"

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
        logits_of<K, T>(q, rows, rows + AHEAD, count, c.dim, some);
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
    share(c.threads, c.heads, 1, [&](int head) { shares_of<K>(c, head, l + head * each); });
    return 0;
}

// ---------------------------------------------------------------- codes

struct Coded {  // strides in elements, but that of rows: bytes
    const char *row;  // a token's K of each head; or queries [heads * group][dim]: of `kind`
    long row_head;
    const float *factors;    // [heads][dim][dim]: lower triangles
    const float *centroids;  // [heads][sums][dim]
    long centroid_head;
    uint8_t *codes;  // [heads][..]
    long code_head;
    const float *cos, *sin;      // [pairs]: by which rows are turned
    const int32_t *stop, *room;  // [heads]: the tokens below `stop` compete for as many places
    int32_t *out, *counts;       // [heads][most], [heads]
    int heads, group, dim, pairs, sums, kind, token;
    int first;  // so many tokens come before all others
    int most, how, threads;
    float scale;
};

constexpr int CODES = 256;  // a code is a byte

// Row i of a head as floats, turned.
template <class K>
void turned(const Coded &c, int head, int i, float *to) {
    const char *from = c.row + head * c.row_head + (long)i * c.dim * K::bytes;
    for (int d = 0; d < c.dim; d += W) store(to + d, read_some<K>(from, d, W));
    turn_pairs(c.cos, c.sin, c.pairs, to);
}

// The code of a token: the centroid that is nearest to its row times the factor, of equal ones the first.
void code_of(const Coded &c, int head, const float *row, float *coded) {
    const float *factor = c.factors + (long)head * c.dim * c.dim;
    const float *centroids = c.centroids + head * c.centroid_head;
    for (int d = 0; d < c.dim; d += W) {
        Floats sum = {};
        for (int i = 0; i < c.dim; i++) sum += load(factor + (long)i * c.dim + d) * row[i];
        store(coded + d, sum);
    }
    float least = INFINITY;
    uint8_t found = 0;
    for (int at = 0; at < c.sums; at += W) {
        Floats parts[W] = {};
        for (int i = 0; i < W && at + i < c.sums; i++)
            for (int d = 0; d < c.dim; d += W) {
                const Floats apart = load(coded + d) - load(centroids + (long)(at + i) * c.dim + d);
                parts[i] += apart * apart;
            }
        const Floats away = totals(parts);
        for (int i = 0; i < W && at + i < c.sums; i++)
            if (away[i] < least) least = away[i], found = (uint8_t)(at + i);
    }
    c.codes[head * c.code_head + c.token] = found;
}

// Each x of [group][dim] becomes the y of factor y = x. A query is a lane of lanes [dim][W].
void undo(const float *factor, int dim, int group, float *x, float *lanes) {
    for (int g = 0; g < group; g += W) {
        const int some = group - g < W ? group - g : W;
        for (int i = 0; i < dim; i++) {
            const float *row = factor + (long)i * dim;
            Floats sums[4] = {}, own = {};
            int j = 0;
            for (; j + 4 <= i; j += 4)
                for (int k = 0; k < 4; k++) sums[k] += load(lanes + (j + k) * W) * row[j + k];
            for (; j < i; j++) sums[0] += load(lanes + j * W) * row[j];
            for (int r = 0; r < some; r++) own[r] = x[(long)(g + r) * dim + i];
            store(lanes + i * W, (own - (sums[0] + sums[1] + (sums[2] + sums[3]))) / row[i]);
        }
        for (int i = 0; i < dim; i++)
            for (int r = 0; r < some; r++) x[(long)(g + r) * dim + i] = lanes[i * W + r];
    }
}

// How many of `count` codes are each.
void count_codes(const uint8_t *codes, int count, int32_t *often) {
    constexpr int COPIES = 4;  // equal codes in turn need not wait for each other
    int32_t bins[COPIES][CODES] = {};
    int t = 0;
    for (; t + COPIES <= count; t += COPIES)
        for (int i = 0; i < COPIES; i++) bins[i][codes[t + i]]++;
    for (; t < count; t++) bins[0][codes[t]]++;
    for (int i = 0; i < CODES; i++) often[i] = bins[0][i] + bins[1][i] + bins[2][i] + bins[3][i];
}

// What a token of each code weighs, by logits of codes l [group][BLOCK]: -1 where that is no number, -2 where
// there is no such token.
void weigh_codes(const Coded &c, const float *l, const int32_t *often, float *scores) {
    for (int g = 0; g < c.group; g++, l += BLOCK) {
        alignas(64) float weights[CODES];
        Floats tops = all(-INFINITY), sums = {};
        for (int i = 0; i < CODES; i += W) {
            const Ints here = *(const Ints *)(often + i);
            const Floats x = here > 0 ? load(l + i) * c.scale : all(-INFINITY);
            store(weights + i, x), tops = most(x, tops);
        }
        const float top = largest(tops);
        for (int i = 0; i < CODES; i += W) {
            const Ints here = *(const Ints *)(often + i);
            const Floats weight = here > 0 ? exponential(load(weights + i) - top) : Floats{};
            store(weights + i, weight), sums += weight * __builtin_convertvector(here, Floats);
        }
        const float all_of = total(sums);
        for (int i = 0; i < CODES; i += W) {
            const Floats share = load(weights + i) / all_of, before = load(scores + i);
            const Floats larger = ((before > share) | (before != before)) ? before : share;
            store(scores + i, !g ? share : c.how == MAX ? larger : before + share);
        }
    }
    for (int i = 0; i < CODES; i += W) {
        const Floats x = c.how == MEAN ? load(scores + i) / (float)c.group : load(scores + i);
        store(scores + i, *(const Ints *)(often + i) > 0 ? x == x ? x : all(-1) : all(-2));
    }
}

// The score of the last of `need` tokens, the best first; need becomes how many of its equals have a place.
float last_score(const float *scores, const int32_t *often, int &need) {
    alignas(64) float left[CODES];
    memcpy(left, scores, sizeof left);
    for (;;) {
        Floats tops = all(-2);
        for (int i = 0; i < CODES; i += W) tops = most(load(left + i), tops);
        const float top = largest(tops);
        Ints equal = {};
        for (int i = 0; i < CODES; i += W) {
            const Floats x = load(left + i);
            const Ints same = (Ints)(x == top);
            equal += *(const Ints *)(often + i) & same, store(left + i, same ? all(-2) : x);
        }
        int tokens = 0;
        for (int i = 0; i < W; i++) tokens += equal[i];
        if (tokens >= need || top == -2) return top;
        need -= tokens;
    }
}

typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

INLINE uint32_t not_zero(Bytes x) {  // one bit for each
#if defined(__AVX2__)
    return 0xffff ^ _mm_movemask_epi8((__m128i)(x == 0));
#elif defined(__ARM_NEON)
    const Bytes one = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bits = (uint8x16_t)((Bytes)(x != 0) & one);
    return vaddv_u8(vget_low_u8(bits)) | (uint32_t)vaddv_u8(vget_high_u8(bits)) << 8;
#else
    uint32_t found = 0;
    for (int i = 0; i < 16; i++) found |= (uint32_t)(x[i] != 0) << i;
    return found;
#endif
}

INLINE Bytes picked(Bytes from, Bytes at) {  // at: 0 .. 15
#if defined(__AVX2__)
    return (Bytes)_mm_shuffle_epi8((__m128i)from, (__m128i)at);
#elif defined(__ARM_NEON)
    return (Bytes)vqtbl1q_u8((uint8x16_t)from, (uint8x16_t)at);
#else
    Bytes found;
    for (int i = 0; i < 16; i++) found[i] = from[at[i]];
    return found;
#endif
}

// A set of codes: of each low half a bit for each high half, those below 8 and the others.
struct Set {
    uint8_t low[16] = {}, high[16] = {};
    void add(int code) { (code < 128 ? low : high)[code & 15] |= 1 << (code >> 4 & 7); }
    INLINE uint32_t has(const Set &set, Bytes codes) {
        const Bytes bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128}, half = codes >> 4;
        const Bytes own = codes & 15, below = picked(*(const Bytes *)set.low, own),
                    above = picked(*(const Bytes *)set.high, own);
        return not_zero((half < 8 ? below : above) & picked(bits, half));
    }
};

// The tokens first .. stop - 1 whose codes' scores are above `least`, and of its equals the first `equals`.
void take_codes(const uint8_t *codes, const float *scores, float least, int equals, int first, int stop,
                int32_t *out) {
    Set wanted;
    bool equal[CODES];
    for (int i = 0; i < CODES; i++) {
        equal[i] = scores[i] == least;
        if (scores[i] >= least) wanted.add(i);
    }
    for (int t = first; t < stop; t += 16) {
        const int count = stop - t < 16 ? stop - t : 16;
        uint8_t some[16] = {};
        memcpy(some, codes + t, count);
        uint32_t chosen = Set::has(wanted, *(const Bytes *)(count == 16 ? codes + t : some));
        for (chosen &= (1u << count) - 1; chosen; chosen &= chosen - 1) {
            const int own = t + __builtin_ctz(chosen);
            if (!equal[codes[own]] || equals-- > 0) *out++ = own;
        }
    }
}

template <int T>
INLINE void code_logits(const Coded &c, const char *const *rows, const float *q, float *l) {
    logits_of<Float32, T>(q, rows, rows + AHEAD, c.sums, c.dim, l);
}

struct CodeRoom {  // what a head needs of memory, in floats
    float *rows, *lanes, *logits;
    static long floats(const Coded &c) { return (long)c.dim * (c.group + 2 + W) + (long)(c.group + 3) * BLOCK; }
    CodeRoom(const Coded &c, float *at) : rows(at) {
        lanes = rows + (long)c.dim * (c.group + 2), logits = lanes + (long)c.dim * W;
    }
};

template <class K>
void choose_coded(const Coded &c, int head, const CodeRoom &room) {
    const int stop = c.stop[head] > 0 ? c.stop[head] : 0;
    int kept = c.room[head] < stop ? c.room[head] : stop;
    kept = kept < 0 ? 0 : kept > c.most ? c.most : kept;
    int32_t *const out = c.out + (long)head * c.most;
    int taken = kept == stop || kept < c.first ? kept : c.first;
    for (int i = 0; i < taken; i++) out[i] = i;
    if (int need = kept - taken) {
        const char *rows[BLOCK + AHEAD];
        const float *centroids = c.centroids + head * c.centroid_head;
        const uint8_t *codes = c.codes + head * c.code_head;
        alignas(64) int32_t often[CODES];
        alignas(64) float scores[CODES];
        for (int i = 0; i < listed(c.sums); i++)
            rows[i] = (const char *)(centroids + (long)(i < c.sums ? i : c.sums - 1) * c.dim);
        for (int g = 0; g < c.group; g++) turned<K>(c, head, g, room.rows + (long)g * c.dim);
        undo(c.factors + (long)head * c.dim * c.dim, c.dim, c.group, room.rows, room.lanes);
        int g = 0;
        for (; g + 4 <= c.group; g += 4) code_logits<4>(c, rows, room.rows + g * c.dim, room.logits + g * BLOCK);
        for (; g + 2 <= c.group; g += 2) code_logits<2>(c, rows, room.rows + g * c.dim, room.logits + g * BLOCK);
        for (; g < c.group; g++) code_logits<1>(c, rows, room.rows + g * c.dim, room.logits + g * BLOCK);
        count_codes(codes + c.first, stop - c.first, often);
        weigh_codes(c, room.logits, often, scores);
        const float least = last_score(scores, often, need);
        take_codes(codes, scores, least, need, c.first, stop, out + taken);
    }
    for (int i = kept; i < c.most; i++) out[i] = -1;
    c.counts[head] = kept;
}

template <class K>
int all_coded(const Coded &c, bool learns) {
    static thread_local Scratch scratch;
    if (c.sums > CODES) return 1;
    const long each = CodeRoom::floats(c);
    float *memory = (float *)scratch.get(sizeof(float) * each * c.heads);
    if (!memory) return 2;
    share(c.threads, c.heads, 1, [&](int head) {
        const CodeRoom room(c, memory + head * each);
        if (!learns) return choose_coded<K>(c, head, room);
        turned<K>(c, head, 0, room.rows);
        code_of(c, head, room.rows, room.rows + c.dim);
    });
    return 0;
}

}  // namespace

// kind: of kinds.h, of landmarks. Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_shares(const Shares *c, int kind) {
#define ALL_SHARES(K) all_shares<K>(*c)
    OF_KIND(kind, ALL_SHARES);
}

// Both return what omnikv_shares does.
extern "C" int omnikv_choose_coded(const Coded *c) {
#define CHOOSE_CODED(K) all_coded<K>(*c, false)
    OF_KIND(c->kind, CHOOSE_CODED);
}

extern "C" int omnikv_learn_coded(const Coded *c) {
#define LEARN_CODED(K) all_coded<K>(*c, true)
    OF_KIND(c->kind, LEARN_CODED);
}

extern "C" int omnikv_sizeof_shares() { return sizeof(Shares); }
extern "C" int omnikv_sizeof_coded() { return sizeof(Coded); }
