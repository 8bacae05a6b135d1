// Logits by an index of K: some channels of it, which lie token beside token, or tables of what each code
// gives (kernels/select/index_logits.py).
#include "vector.h"

namespace {

struct Indexed {
    const float *given;  // [heads][group][terms]: parts of the queries; of codes [heads][terms][group][sums]
    const int64_t *rows;  // [heads][terms]: channels; NULL of codes
    const char *index;    // [heads][..][tokens]: K by channel, or codes; strides in bytes
    long index_head, index_row;
    float *out;  // [heads][group][tokens]: strides in elements
    long out_head, out_query;
    int heads, group, terms, sums, tokens, threads;
};

constexpr int WIDE = 4;        // vectors of a tile
constexpr int TILE = 4;        // queries of a tile
constexpr int PART = 4096;     // tokens of a thread's piece
constexpr int NEXT = 8 * W;    // tokens from a tile to what is fetched

// Logits of T queries on tokens t .. t + V * W - 1.
template <class K, int T, int V>
INLINE void some_channels(const Indexed &c, int head, const char *keys, const float *given, int t, float *out) {
    const int64_t *rows = c.rows + (long)head * c.terms;
    Floats sums[T][V] = {};
    for (int i = 0; i < c.terms; i++) {
        const char *row = keys + rows[i] * c.index_row + (long)t * K::bytes;
        for (int v = 0; v < V; v++) {
            if (V > 1) __builtin_prefetch(row + (v * W + NEXT) * K::bytes);
            const Floats x = K::read(row, v * W);
            for (int r = 0; r < T; r++) sums[r][v] += x * given[r * c.terms + i];
        }
    }
    for (int r = 0; r < T; r++)
        for (int v = 0; v < V; v++) store(out + r * c.out_query + t + v * W, sums[r][v]);
}

template <class K, int T>
INLINE void queries_channels(const Indexed &c, int head, const char *keys, const float *given, int t, int stop,
                             float *out) {
    for (; t + WIDE * W <= stop; t += WIDE * W) some_channels<K, T, WIDE>(c, head, keys, given, t, out);
    for (; t + W <= stop; t += W) some_channels<K, T, 1>(c, head, keys, given, t, out);
    for (; t < stop; t++)  // an element at a time: behind the last there may be no memory
        for (int r = 0; r < T; r++) {
            float sum = 0;
            for (int i = 0; i < c.terms; i++) {
                alignas(64) char one[W * 4] = {};
                memcpy(one, keys + c.rows[(long)head * c.terms + i] * c.index_row + (long)t * K::bytes, K::bytes);
                sum += K::read(one, 0)[0] * given[r * c.terms + i];
            }
            out[r * c.out_query + t] = sum;
        }
}

template <class K>
void channels(const Indexed &c, int head, int first, int stop) {
    const char *keys = c.index + head * c.index_head;
    const float *given = c.given + (long)head * c.group * c.terms;
    float *out = c.out + head * c.out_head;
    int g = 0;
    for (; g + TILE <= c.group; g += TILE)
        queries_channels<K, TILE>(c, head, keys, given + g * c.terms, first, stop, out + g * c.out_query);
    for (; g + 2 <= c.group; g += 2)
        queries_channels<K, 2>(c, head, keys, given + g * c.terms, first, stop, out + g * c.out_query);
    for (; g < c.group; g++)
        queries_channels<K, 1>(c, head, keys, given + g * c.terms, first, stop, out + g * c.out_query);
}

template <class Code>
void codes(const Indexed &c, int head, int first, int stop) {
    const char *index = c.index + head * c.index_head;
    for (int g = 0; g < c.group; g++) {
        float *out = c.out + head * c.out_head + g * c.out_query;
        for (int p = 0; p < c.terms; p++) {
            const float *table = c.given + (((long)head * c.terms + p) * c.group + g) * c.sums;
            const Code *row = (const Code *)(index + p * c.index_row);
            if (p)
                for (int t = first; t < stop; t++) out[t] += table[row[t]];
            else
                for (int t = first; t < stop; t++) out[t] = table[row[t]];
        }
    }
}

typedef void Part(const Indexed &, int, int, int);

int in_parts(const Indexed &c, Part *part) {
    const int parts = (c.tokens + PART - 1) / PART, work = parts * c.heads;
#pragma omp parallel for schedule(static) num_threads(c.threads) if (c.threads > 1 && work > 1)
    for (int i = 0; i < work; i++) {
        const int first = i % parts * PART;
        part(c, i / parts, first, first + PART < c.tokens ? first + PART : c.tokens);
    }
    return 0;
}

}  // namespace

// kind: of kinds.h, of K. Returns 0, or 1 for a kind that this build lacks.
extern "C" int omnikv_channel_logits(const Indexed *c, int kind) {
#define BY_CHANNEL(K) in_parts(*c, channels<K>)
    OF_KIND(kind, BY_CHANNEL);
}

// size: bytes of a code.
extern "C" int omnikv_code_logits(const Indexed *c, int size) {
    return size == 1 ? in_parts(*c, codes<uint8_t>) : size == 4 ? in_parts(*c, codes<int32_t>) : 1;
}

extern "C" int omnikv_sizeof_indexed() { return sizeof(Indexed); }
