// A mixture of experts for up to 8 rows: the router's product, the choice, the first matrix of every chosen
// expert with its activation, and the sum of their last ones, each expert of floats and read once for its rows.
#include <math.h>

#include "activation.h"
#include "mixture.h"
#include "product.h"
#include "scratch.h"

extern "C" void omnikv_few_bits_together(const Product *ps, int count);
extern "C" int omnikv_act_rows(const char *made, char *out, int kind, int rows, int inputs, int threads, int activation,
                               float limit, float alpha);

namespace {

constexpr int CHOSEN = TOGETHER;  // experts that a row may choose

typedef MixtureCall Call;

// A NaN ranks highest, as in torch.topk.
INLINE float rank_of(float x) { return x == x ? x : INFINITY; }

// The best of `ranks`: the lower number among equals.
static void take_best(const float *ranks, const Mixture &m, int *numbers) {
    for (int i = 0; i < m.per_token; i++) {
        int best = -1;
        for (int e = 0; e < m.count; e++) {
            bool taken = false;
            for (int before = 0; before < i; before++) taken |= numbers[before] == e;
            if (!taken && (best < 0 || rank_of(ranks[e]) > rank_of(ranks[best]))) best = e;
        }
        numbers[i] = best;
    }
}

// Shares of the chosen experts from the router's logits: sigmoids where a correction ranks, else the softmax
// of the chosen or of all.
static void choose(const Mixture &m, const float *logits, float *ranks, int *numbers, float *shares) {
    const bool sigmoids = m.correction;
    for (int e = 0; e < m.count; e++)
        ranks[e] = sigmoids ? 1 / (1 + expf(-logits[e])) + m.correction[e] : logits[e];
    take_best(ranks, m, numbers);
    float whole = 0;
    if (sigmoids) {
        for (int i = 0; i < m.per_token; i++) whole += shares[i] = 1 / (1 + expf(-logits[numbers[i]]));
        if (!m.normalise) whole = 1;
    } else {
        const float top = logits[numbers[0]];
        for (int i = 0; i < m.per_token; i++) whole += shares[i] = expf(logits[numbers[i]] - top);
        if (!m.normalise) {
            whole = 0;
            for (int e = 0; e < m.count; e++) whole += expf(logits[e] - top);
        }
    }
    for (int i = 0; i < m.per_token; i++) shares[i] = shares[i] / whole * (m.factors ? m.factors[numbers[i]] : 1);
}

// Outputs first .. of an expert's activation for its rows, `count` <= W of them.
template <class P>
static void open_block(const ProductCall &c, const Mixture &m, const typename P::Element *x, int ahead, int first,
                       int count, Floats *gate) {
    typedef typename P::Kind K;
    Floats up[MOST] = {};
    if (m.acts.kind == CLAMPED) {  // gates and ups in turns
        const int low = 2 * count < W ? 2 * count : W;
        multiply<P>(c, x, ahead, 2 * first, low, gate);
        if (2 * count > W) multiply<P>(c, x, ahead, 2 * first + W, 2 * count - W, up);
        for (int r = 0; r < c.rows; r++) take_turns(gate[r], up[r]);
    } else {
        multiply<P>(c, x, ahead, first, count, gate);
        if (m.acts.kind != SQUARED) multiply<P>(c, x, ahead, c.matrix->outputs / 2 + first, count, up);
    }
    for (int r = 0; r < c.rows; r++) gate[r] = acted<K>(m.acts, gate[r], up[r]);
}

// The experts that the rows of a call chose: each once, ascending, with the rows that chose it.
struct List {
    int count, numbers[CHOSEN * MOST];
    int first[CHOSEN * MOST + 1];  // of an expert's rows among all pairs of an expert and a row
    int row[CHOSEN * MOST];
    float share[CHOSEN * MOST];

    // numbers, shares: [rows][each].
    void make(const int *chosen, const float *shares, int rows, int each, int experts) {
        count = 0;
        int pairs = 0;
        for (int e = 0; e < experts; e++) {
            const int from = pairs;
            for (int i = 0; i < rows * each; i++)
                if (chosen[i] == e) row[pairs] = i / each, share[pairs++] = shares[i];
            if (pairs > from) numbers[count] = e, first[count++] = from;
        }
        first[count] = pairs;
    }
    int rows(int i) const { return first[i + 1] - first[i]; }
};

template <class P>
INLINE int padded(int columns) {
    return (columns + 2 * P::width - 1) / (2 * P::width) * (2 * P::width);
}

INLINE ProductCall rows_of(const Matrix *matrix, int rows, const char *x = nullptr) {
    return {matrix, x, nullptr, nullptr, nullptr, 0, rows, 0, 0, 1, {}};
}

// What each row chooses, and the shares as K rounds them: by itself, whatever rows go with it.
template <class P>
static void choose_all(const Call &c, const typename P::Element *x, int ahead, float *logits, int *numbers,
                       float *shares) {
    typedef typename P::Kind K;
    const Mixture &m = *c.mixture;
    if (c.numbers) {
        for (int i = 0; i < c.rows * m.per_token; i++) numbers[i] = c.numbers[i], shares[i] = c.shares[i];
    } else {
        const long blocks = (m.count + W - 1) / W;
        const bool many = (long)m.count * m.router->inputs * K::bytes > LITTLE;
        share(many ? c.threads : 1, blocks, 1, [&](long block) {
            const int first = block * W, count = m.count - first < W ? m.count - first : W;
            for (int r = 0; r < c.rows; r++) {
                Floats found[1];
                multiply<P>(rows_of(m.router, 1), x + (long)r * ahead, ahead, first, count, found);
                write_some<Float32>(logits + (long)r * m.count, first, count, found[0]);
            }
        });
        float *const ranks = logits + (long)c.rows * m.count;
        for (int r = 0; r < c.rows; r++)
            choose(m, logits + (long)r * m.count, ranks, numbers + r * m.per_token, shares + r * m.per_token);
    }
    for (int i = 0; i < c.rows * m.per_token; i++) shares[i] = Kept<K>::rounded(all(shares[i]))[0];
}

// Pieces of blocks of so many bytes each.
INLINE long piece_of(long bytes) { return bytes < PIECE ? PIECE / (bytes + 1) + 1 : 1; }

// Returns 0, or 2 without memory.
template <class P>
static int run(const Call &c) {
    typedef typename P::Kind K;
    typedef typename P::Element Element;
    static thread_local Scratch scratch;
    const Mixture &m = *c.mixture;
    const int hidden = m.router->inputs, width = m.last[0]->inputs, pairs = c.rows * m.per_token;
    const int ahead = padded<P>(hidden), apart = padded<P>(width);
    const long numbers_bytes = sizeof(float) * (c.rows + 1l) * m.count + 64;
    const long rows = pairs + MOST;  // the prepared rows of a product lie in whole blocks of MOST
    float *logits = (float *)scratch.get(numbers_bytes + sizeof(Element) * ((rows + MOST) * ahead + rows * apart));
    if (!logits) return 2;
    Element *x = (Element *)(((uintptr_t)(logits + (c.rows + 1l) * m.count) + 63) & ~(uintptr_t)63);
    Element *given = x + (long)MOST * ahead, *middle = given + rows * ahead;
    int numbers[CHOSEN * MOST];
    float shares[CHOSEN * MOST];
    List list;

    prepare<P>(rows_of(m.router, c.rows, c.routed ? c.routed : c.x), x, ahead);
    choose_all<P>(c, x, ahead, logits, numbers, shares);
    list.make(numbers, shares, c.rows, m.per_token, m.count);
    if (c.routed) prepare<P>(rows_of(m.router, c.rows, c.x), x, ahead);
    for (int i = 0; i < pairs && c.rows > 1; i++)
        memcpy(given + (long)i * ahead, x + (long)list.row[i] * ahead, sizeof(Element) * ahead);
    if (c.rows == 1) given = x;
    const long of_row = c.rows > 1 ? ahead : 0;

    const long expert = (long)m.first[0]->outputs * hidden * K::bytes, blocks = (width + W - 1) / W;
    const int threads = list.count * expert > LITTLE ? c.threads : 1;
    share(threads, list.count * blocks, piece_of(expert / blocks), [&](long block) {
        const int i = block / blocks, first = block % blocks * W;
        const int count = width - first < W ? width - first : W;
        Floats found[MOST] = {};
        const ProductCall call = rows_of(m.first[list.numbers[i]], list.rows(i));
        open_block<P>(call, m, given + list.first[i] * of_row, ahead, first, count, found);
        for (int r = 0; r < call.rows; r++) {
            Element *to = middle + (long)(list.first[i] + r) * apart;
            P::keep(to + first, found[r]);
            if (first + W >= width)  // what products read behind the last
                memset(to + width, 0, sizeof(Element) * (apart - width));
        }
    });
    const long all_bytes = (long)list.count * W * width * K::bytes;
    share(threads, (hidden + W - 1) / W, piece_of(all_bytes), [&](long block) {
        const int first = block * W, count = hidden - first < W ? hidden - first : W;
        Floats sum[MOST] = {}, found[MOST];
        for (int i = 0; i < list.count; i++) {
            const ProductCall call = rows_of(m.last[list.numbers[i]], list.rows(i));
            multiply<P>(call, middle + (long)list.first[i] * apart, apart, first, count, found);
            for (int r = 0; r < call.rows; r++)
                sum[list.row[list.first[i] + r]] += list.share[list.first[i] + r] * found[r];
        }
        for (int r = 0; r < c.rows; r++) {
            const long at = (long)r * hidden + first;
            if (c.residual) sum[r] = read_some<K>(c.residual, at, count) + Kept<K>::rounded(sum[r]);
            write_some<K>(c.out, at, count, sum[r]);
        }
    });
    return 0;
}

// Experts in few bits, for one row.
template <class P>
static int run_few(const Call &c) {
    typedef typename P::Kind K;
    typedef typename P::Element Element;
    static thread_local Scratch scratch;
    const Mixture &m = *c.mixture;
    const Product &first = *m.few_first[0], &last = *m.few_last[0];
    const int hidden = m.router->inputs, ahead = padded<P>(hidden), most = m.per_token;
    const long floats = few_floats(first) > few_floats(last) ? few_floats(first) : few_floats(last);
    const long sizes[] = {4l * 2 * m.count, (long)sizeof(Element) * MOST * ahead, (long)K::bytes * most * first.outputs,
                          (long)K::bytes * most * last.inputs, (long)K::bytes * most * hidden, 4l * most * floats};
    long total = 0;
    for (const long size : sizes) total += (size + 63) / 64 * 64;
    char *at = (char *)scratch.get(total), *parts[6];
    if (!at) return 2;
    for (int i = 0; i < 6; i++) parts[i] = at, at += (sizes[i] + 63) / 64 * 64;
    char *const made = parts[2], *const middle = parts[3], *const ends = parts[4];
    Element *x = (Element *)parts[1];
    int numbers[CHOSEN];
    float shares[CHOSEN];
    List list;

    prepare<P>(rows_of(m.router, 1, c.routed ? c.routed : c.x), x, ahead);
    choose_all<P>(c, x, ahead, (float *)parts[0], numbers, shares);
    list.make(numbers, shares, 1, most, m.count);
    const bool gated = m.acts.kind == SILU;
    Product products[CHOSEN];
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < list.count; i++) {
            Product &p = products[i] = *(pass ? m.few_last : m.few_first)[list.numbers[i]];
            char *const opened = middle + (long)i * last.inputs * K::bytes;
            p.x = pass ? opened : c.x;
            p.out = pass ? ends + (long)i * hidden * K::bytes : gated ? opened : made + (long)i * p.outputs * K::bytes;
            p.scratch = (float *)parts[5] + i * floats;
            p.gated = gated && !pass, p.threads = c.threads;
        }
        omnikv_few_bits_together(products, list.count);
        if (!pass && !gated)
            omnikv_act_rows(made, middle, m.router->kind, list.count, first.outputs, c.threads, m.acts.kind,
                            m.acts.limit, m.acts.alpha);
    }
    for (int o = 0; o < hidden; o += W) {
        Floats sum = {};
        for (int i = 0; i < list.count; i++) {
            const Floats part = read_some<K>(ends + (long)i * hidden * K::bytes, o, hidden - o);
            for (int pair = list.first[i]; pair < list.first[i + 1]; pair++) sum += list.share[pair] * part;
        }
        if (c.residual) sum = read_some<K>(c.residual, o, hidden - o) + Kept<K>::rounded(sum);
        write_some<K>(c.out, o, hidden - o, sum);
    }
    return 0;
}

template <class P>
static int any(const Call &c) {
    return c.mixture->few_first ? run_few<P>(c) : run<P>(c);
}

}  // namespace

// Experts in few bits take one row. Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_mixture(const Call *c) {
    const int kind = c->mixture->router->kind;
    if (kind == FLOAT32) return any<Each<Float32>>(*c);
#if defined(HAS_PAIRS)
    if (kind == BFLOAT16) return any<Pairs>(*c);
#else
    if (kind == BFLOAT16) return any<Each<BFloat16>>(*c);
#endif
#if defined(HAS_FLOAT16)
    if (kind == FLOAT16) return any<Each<Float16>>(*c);
#endif
    return 1;
}

extern "C" int omnikv_sizeof_mixture() { return sizeof(Mixture); }
extern "C" int omnikv_sizeof_mixture_call() { return sizeof(Call); }
