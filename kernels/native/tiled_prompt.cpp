// Attention of a prompt by tiles (amx.h): bfloat16, or rows of 8 bits that queries and weights of 16 bits meet
// in two digits, so that sums are those of prefill.cpp to the bit.
//
// A block of keys is packed once for some hundred queries. Rows of queries then go through three stages, each
// a tile behind the one before: products with keys, softmax, products with values. The softmax of one tile
// runs between the products of its neighbours.
#include <stdlib.h>

#include "prompt.h"
#include "team.h"
#include "tiles.h"

namespace {

#if defined(HAS_TILES)
// How rows of X are multiplied. of_key: bytes of an element of a row of keys; step: inner elements of a step
// of depth; keep: weights of 2 W keys from i on, of a row of a tile, each times a scale.
struct Floating : TilePairs {
    typedef BFloat16 Row;
    struct Element { uint16_t of; };
    static constexpr bool whole = false;
    static constexpr int of_key = 2, step = 32;
    INLINE void keep(Floats one, Floats two, Floats s, Floats t, Element *to, int i) {
        Halves *const at = (Halves *)((char *)to + i / step * 2 * TILE + i % step * 2);
        at[0] = narrow_halves(one * s), at[1] = narrow_halves(two * t);
    }
};

struct Counting : TileDigits {
    typedef Int8 Row;
    struct Element { int8_t of; };
    static constexpr bool whole = true;
    static constexpr int of_key = 1, step = 64;
    INLINE void keep(Floats one, Floats two, Floats s, Floats t, Element *to, int i) {
        char *at = (char *)to + i / step * 2 * TILE + i % step;
        put_digits(_mm512_cvtepi32_epi16((__m512i)in_lower_bits(one, s)), at, at + TILE);
        put_digits(_mm512_cvtepi32_epi16((__m512i)in_lower_bits(two, t)), at + W, at + TILE + W);
    }
};

// Of a tile of rows, while it goes through the stages.
template <class M>
struct Passage {
    float *logits;  // [32][NEAR], sums of digits as they come
    char *weights;  // [steps of keys][2] tiles
    float steps[M::of_rows];
};

template <class M>
struct Work : Rows {  // of one thread
    static constexpr int key_steps = NEAR / M::step;
    char *q, *keys, *values;  // [tiles of rows][steps][2], [panels of 16 keys][steps], [.. 16 columns][key_steps] tiles
    Passage<M> passages[2];
    float *found;  // [32][SIDE]
    char *block;
    int depth;  // steps of a row of q

    explicit Work(const Call &c) {
        depth = (c.dim + M::step - 1) / M::step, wide = (c.dim + SIDE - 1) / SIDE * SIDE;
        const long rows = (UNIT + c.group + M::of_rows - 1) / M::of_rows * M::of_rows;
        const long weights = 2l * key_steps * TILE, logits = 2l * TILE_ROWS * NEAR * 4;
        const long sizes[] = {rows / M::of_rows * depth * 2 * TILE, NEAR / TILE_ROWS * depth * TILE,
                              wide / TILE_ROWS * key_steps * TILE, logits, logits, weights, weights,
                              2 * TILE_ROWS * SIDE * 4, rows * wide * 4, rows * 4, rows * 4, rows * 4, NEAR * 4,
                              NEAR * 4};
        long total = 0;
        for (long size : sizes) total += (size + 63) / 64 * 64;
        block = (char *)aligned_alloc(64, total);
        if (!block) return;
        char *at = block;
        void **const places[] = {(void **)&q, (void **)&keys, (void **)&values, (void **)&passages[0].logits,
                                 (void **)&passages[1].logits, (void **)&passages[0].weights,
                                 (void **)&passages[1].weights, (void **)&found, (void **)&out, (void **)&best,
                                 (void **)&sum, (void **)&query_scale, (void **)&key_scale, (void **)&value_scale};
        for (int i = 0; i < 14; i++) *places[i] = at, at += (sizes[i] + 63) / 64 * 64;
    }
    Work(const Work &) = delete;
    ~Work() { free(block); }
};

// A row of queries in its place of a tile's steps. Returns its scale, 1 where it stays floats.
template <class Q>
INLINE float put_query(const char *row, int dim, char *to, Floating) {
    for (int d = 0; d < dim; d += W)
        *(Halves *)(to + d / Floating::step * 2 * TILE + d % Floating::step * 2) = *(const Halves *)(row + 2 * d);
    return 1;
}

template <class Q>
INLINE float put_query(const char *row, int dim, char *to, Counting) {
    alignas(64) float x[WIDEST];
    for (int d = 0; d < dim; d += W) store(x + d, Q::read(row, d));
    const Steps steps(x, dim);
    Ints sum = {};
    for (int d = 0; d < dim; d += 16) {
        char *at = to + d / Counting::step * 2 * TILE + d % Counting::step;
        put_digits(shorts_of(x + d, steps.inverse, sum), at, at + TILE);
    }
    return steps.step;
}

template <class M, class Q>
static void take_queries(const Call &c, int head, int first, int rows, Work<M> &w) {
    const int tiles = (rows + M::of_rows - 1) / M::of_rows;
    memset(w.q, 0, (long)tiles * w.depth * 2 * TILE);
    memset(w.out, 0, sizeof(float) * tiles * M::of_rows * w.wide);
    for (int r = 0; r < tiles * M::of_rows; r++) w.query_scale[r] = 1, w.best[r] = -INFINITY, w.sum[r] = 0;
    for (int r = 0; r < rows; r++) {
        const long query = first + r / c.group, at = head * c.group + r % c.group;
        const char *const from = c.q + (query * c.query + at * c.query_head) * Q::bytes;
        const int in = r % M::of_rows;
        char *const to = w.q + (long)(r / M::of_rows) * w.depth * 2 * TILE + in / 16 * TILE + in % 16 * TILE_BYTES;
        w.query_scale[r] = put_query<Q>(from, c.dim, to, M{});
    }
    for (int i = 0; i < NEAR; i++) w.key_scale[i] = w.value_scale[i] = 0;
}

// 16 columns of values of a step's keys, NULL for zeros: pairs or fours of rows side by side.
INLINE void put_values(const char *const *rows, int d, char *to, Floating) {
    for (int t = 0; t < Floating::step; t += 2) {
        Ints x[2] = {};
        for (int i = 0; i < 2; i++)
            if (rows[t + i]) x[i] = __builtin_convertvector(*(const Halves *)(rows[t + i] + 2 * d), Ints);
        *(Ints *)(to + t / 2 * TILE_BYTES) = x[0] | x[1] << 16;
    }
}

INLINE void put_values(const char *const *rows, int d, char *to, Counting) {
    for (int t = 0; t < Counting::step; t += 4) {
        __m512i all = _mm512_setzero_si512();
        UNROLL for (int i = 0; i < 4; i++)
            if (rows[t + i]) {
                const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(rows[t + i] + d)));
                all = _mm512_or_si512(all, _mm512_slli_epi32(x, 8 * i));
            }
        _mm512_storeu_si512(to + t / 4 * TILE_BYTES, all);
    }
}

// Pack keys and values of visited rows t .. t+count-1, zeros behind them.
template <class M>
static void pack(const Call &c, int head, int t, int count, Work<M> &w) {
    typedef typename M::Row X;
    const char *keys[NEAR] = {}, *values[NEAR] = {};
    for (int i = 0; i < count; i++) {
        const long row = row_of(c, head, t + i);
        keys[i] = c.k + head * c.key_head + row * c.key_row;
        values[i] = c.v + head * c.value_head + row * c.value_row;
        if (X::scaled) w.key_scale[i] = X::scale(keys[i], c.dim), w.value_scale[i] = X::scale(values[i], c.dim);
    }
    if (X::scaled)
        for (int i = count; i < NEAR; i++) w.value_scale[i] = 0;
    for (int i = 0; i < count; i += TILE_ROWS)
        for (int k = 0; k < w.depth; k++) {
            const int from = k * TILE_BYTES;
            turn_tile(keys + i, from, c.dim * M::of_key - from, w.keys + (i / TILE_ROWS * w.depth + k) * TILE);
        }
    for (int d = 0; d < w.wide; d += TILE_ROWS)
        for (int i = 0; i < count; i += M::step) {
            char *const to = w.values + (d / TILE_ROWS * w.key_steps + i / M::step) * TILE;
            if (d < c.dim) put_values(values + i, d, to, M{});
            else memset(to, 0, TILE);
        }
    if (M::whole) in_steps(w);
}

// Logits of a tile of rows and `count` keys.
template <class M, class Between>
INLINE void meet_keys(const Work<M> &w, int tile, int count, Passage<M> &p, const Between &between) {
    const char *const q = w.q + (long)tile * w.depth * 2 * TILE;
    for (int i = 0; i < count; i += SIDE) {
        const char *const first = w.keys + i / TILE_ROWS * w.depth * TILE;
        zero_sums();
        // behind an odd number of panels lies what is left of another block, and nobody sees its logits
        add_tiles<M>(q, {first, first + w.depth * TILE}, w.depth, between);
        store_sums(p.logits + i, NEAR * 4);
    }
}

// Adds the values of `count` keys to rows of a tile.
template <class Between>
INLINE void meet_values(Work<Floating> &w, int tile, int count, Passage<Floating> &p, const Between &between) {
    typedef Work<Floating> Mine;
    for (int d = 0; d < w.wide; d += SIDE) {
        const char *const first = w.values + d / TILE_ROWS * Mine::key_steps * TILE;
        float *const out = w.out + (long)tile * Floating::of_rows * w.wide + d;
        load_sums(out, w.wide * 4);
        add_tiles<Floating>(p.weights, {first, first + Mine::key_steps * TILE},
                            (count + Floating::step - 1) / Floating::step, between);
        store_sums(out, w.wide * 4);
    }
}

template <class Between>
INLINE void meet_values(Work<Counting> &w, int tile, int count, Passage<Counting> &p, const Between &between) {
    typedef Work<Counting> Mine;
    for (int d = 0; d < w.wide; d += SIDE) {
        const char *const first = w.values + d / TILE_ROWS * Mine::key_steps * TILE;
        zero_sums();
        add_tiles<Counting>(p.weights, {first, first + Mine::key_steps * TILE},
                            (count + Counting::step - 1) / Counting::step, between);
        store_sums(w.found, SIDE * 4);
        for (int r = 0; r < Counting::of_rows; r++)
            for (int j = 0; j < SIDE; j += W) {
                float *to = w.out + (long)(tile * Counting::of_rows + r) * w.wide + d + j;
                const Ints sum = digits_sum((const int32_t *)w.found, SIDE, r, j);
                store(to, load(to) + __builtin_convertvector(sum, Floats) * p.steps[r]);
            }
    }
}

// Row r of a tile: its logits become weights.
template <class M>
INLINE void soften_row(const Call &c, Work<M> &w, int first, int tile, int r, int t, int count, Passage<M> &p) {
    const int at = tile * M::of_rows + r;
    float *x = p.logits + r * NEAR;
    Floats top = all(-INFINITY);
    for (int i = 0; i < count; i += W) {  // what lies behind the keys was not written
        if (M::whole) {
            const Ints sum = digits_sum((const int32_t *)p.logits, NEAR, r, i);
            store(x + i, __builtin_convertvector(sum, Floats) * load(w.key_scale + i));
        }
        top = most(top, load(x + i));
    }
    typename M::Element *const to = (typename M::Element *)(p.weights + r / 16 * TILE + r % 16 * TILE_BYTES);
    const Fading fading = measured<M>(c, w, x, top, seen_of(c, first + at / c.group, t, count), at);
    const float share = M::whole ? exponentials(all(fading.behind))[0] : 1;
    p.steps[r] = soften<M, typename M::Row>(w, x, fading, share, at, to);
}

// All tiles of rows of a unit from `tile` on meet the block of keys that is packed: visited rows from t on.
template <class M>
static void meet(const Call &c, Work<M> &w, int first, int tile, int tiles, int rows, int t, int count) {
    const int steps = (count + M::step - 1) / M::step, pairs = (count + SIDE - 1) / SIDE;
    for (int stage = tile; stage < tiles + 2; stage++) {
        const bool keys = stage < tiles, values = stage >= tile + 2;
        const int softened = stage - 1, left = rows - softened * M::of_rows;
        const int some = softened < tile || softened >= tiles ? 0 : left < M::of_rows ? left : M::of_rows;
        const auto row = [&](int r) { soften_row<M>(c, w, first, softened, r, t, count, w.passages[softened % 2]); };
        const int beats = (keys ? pairs * w.depth : 0) + (values ? w.wide / SIDE * steps : 0);
        typedef Dealt<decltype(row)> Softmax;
        Softmax softmax(row, some, beats);
        const auto between = [&] { Softmax::between(softmax); };
        // values first: the softmax of their tile is done, and what it wrote is near
        if (values) meet_values(w, stage - 2, count, w.passages[stage % 2], between);
        if (keys) meet_keys<M>(w, stage, count, w.passages[stage % 2], between);
        Softmax::rest(softmax);
    }
}

// Queries first .. last-1 under one K/V head.
template <class M, class Q>
static void run_unit(const Call &c, int head, int first, int last, Work<M> &w) {
    const int rows = (last - first) * c.group, tiles = (rows + M::of_rows - 1) / M::of_rows;
    take_queries<M, Q>(c, head, first, rows, w);
    const Span all = visited_of(c, first, last);
    for (int t = all.low; t < all.high; t += NEAR) {
        const int count = all.high - t < NEAR ? all.high - t : NEAR;
        pack<M>(c, head, t, count, w);
        int tile = 0;  // the first of which a row sees the block
        while (c.causal && tile < tiles - 1 && c.high + first + ((tile + 1) * M::of_rows - 1) / c.group < t) tile++;
        meet<M>(c, w, first, tile, tiles, rows, t, count);
    }
    give(c, w, head, first, rows);
}

// Returns 0, 2 where there is no memory for a thread's work, or 3 for an exception of the reference's tiles.
template <class M, class Q>
static int run(const Call &c) {
    if (c.queries < 1) return 0;
    std::atomic<int> wrong{0};
    const int most = UNIT / c.group > 0 ? UNIT / c.group : 1;
    // as many units for a few threads, but none that packs for a handful of queries
    const int units = (c.queries + most - 1) / most, size = (c.queries + units - 1) / units;
    const long parts = (long)units * c.kv_heads;
    in_pieces(c.threads, parts, 1, [&](Pieces &pieces) {
        Work<M> work(c);
        const Tiled tiled;
        if (!work.block) wrong = 2;
        for (long at, stop; work.block && pieces.next(at, stop);)
            for (long i = at; i < stop; i++) {
                const long part = largest_first(i, parts, c.threads);  // later queries see more rows
                const int first = part / c.kv_heads * size, end = first + size < c.queries ? first + size : c.queries;
                if (first < end) run_unit<M, Q>(c, part % c.kv_heads, first, end, work);
            }
        if (tile_fault()) wrong = 3;
    });
    return wrong;
}
#endif

}  // namespace

// kinds as omnikv_prefill's: BFLOAT16 rows of such queries, or INT8 rows of FLOAT32 ones, which become whole
// numbers. Returns what it does, or 3 for an exception that tiles raised in the reference.
extern "C" int omnikv_tiled_prompt(const Call *c, int q, int rows) {
#if defined(HAS_TILES)
    if (q == BFLOAT16 && rows == BFLOAT16) return run<Floating, BFloat16>(*c);
    if (q == FLOAT32 && rows == INT8 && c->dim <= WIDEST) return run<Counting, Float32>(*c);
#endif
    (void)c, (void)q, (void)rows;
    return 1;
}
