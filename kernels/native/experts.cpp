// A mixture of experts for one row: the router's product, the choice, the first matrix of every chosen
// expert with its activation, and the sum of their last ones, each expert of floats and read once.
#include <math.h>

#include "product.h"
#include "scratch.h"

namespace {

constexpr int CHOSEN = 64;  // experts that a row may choose

enum { SILU, GELU, CLAMPED, SQUARED };  // what lies between an expert's matrices (kernels/experts/open.py)

struct Mixture {
    const Matrix *router;               // [count, hidden], with its bias
    const Matrix *const *first, *const *last;  // of each expert
    const float *correction, *factors;  // [count] or NULL: added to the sigmoids that rank; of shares
    int count, per_token, normalise, activation;
    float limit, alpha;
};

struct Call {
    const Mixture *mixture;
    const char *x, *routed, *residual;  // [hidden]; what the router reads; or NULL
    char *out;                          // [hidden]
    const int64_t *numbers;             // [per_token]: what was chosen elsewhere, or NULL
    const float *shares;                // [per_token], of those
    int threads;
};

// A NaN ranks highest, as in torch.topk.
INLINE float rank_of(float x) { return x == x ? x : INFINITY; }

// The best of `ranks`, which are written over: the lower number among equals. Returns 1 where all are taken.
static void take_best(float *ranks, const Mixture &m, int *numbers) {
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

INLINE Floats sigmoid_of(Floats x) { return 1 / (1 + exponential(x < -88 ? all(88) : -x)); }

// Outputs first .. of an expert's activation, `count` <= W of them.
template <class P>
static Floats opened(const ProductCall &c, const Mixture &m, const typename P::Element *x, int ahead, int first,
                     int count) {
    typedef Kept<typename P::Kind> Kind;
    Floats gate[1] = {}, up[1] = {};
    if (m.activation == SQUARED) {
        multiply<P>(c, x, ahead, first, count, gate);
        const Floats positive = gate[0] < 0 ? Floats{} : gate[0];  // NaN stays
        return positive * positive;
    }
    if (m.activation == CLAMPED) {  // gates and ups in turns
        const int low = 2 * count < W ? 2 * count : W;
        multiply<P>(c, x, ahead, 2 * first, low, gate);
        if (2 * count > W) multiply<P>(c, x, ahead, 2 * first + W, 2 * count - W, up);
        float both[2 * W], gates[W], ups[W];
        store(both, gate[0]), store(both + W, up[0]);
        for (int i = 0; i < W; i++) gates[i] = both[2 * i], ups[i] = both[2 * i + 1];
        Floats g = load(gates), u = load(ups);
        g = g > m.limit ? all(m.limit) : g;  // NaN stays
        u = u > m.limit ? all(m.limit) : u < -m.limit ? all(-m.limit) : u;
        return (u + 1) * (g * sigmoid_of(g * m.alpha));
    }
    multiply<P>(c, x, ahead, first, count, gate);
    multiply<P>(c, x, ahead, c.matrix->outputs / 2 + first, count, up);
    const Floats g = gate[0];
    // (1 + tanh(u)) / 2 is the sigmoid of 2 u
    const Floats turned = m.activation == GELU ? 1.5957691216057308f * (g + 0.044715f * g * g * g) : g;
    const Floats acted = m.activation == GELU ? g * sigmoid_of(turned) : silu(g);
    return Kind::rounded(acted) * up[0];
}

template <class P>
INLINE int padded(int columns) {
    return (columns + 2 * P::width - 1) / (2 * P::width) * (2 * P::width);
}

// Returns 0, or 2 without memory.
template <class P>
static int run(const Call &c) {
    typedef typename P::Kind K;
    typedef typename P::Element Element;
    static thread_local Scratch scratch;
    const Mixture &m = *c.mixture;
    const int hidden = m.router->inputs, width = m.last[0]->inputs, n = m.per_token;
    const int ahead = padded<P>(hidden), apart = padded<P>(width);
    const long elements = ahead + (long)n * apart;
    float *logits = (float *)scratch.get(sizeof(float) * 2 * m.count + 64 + sizeof(Element) * elements);
    if (!logits) return 2;
    float *ranks = logits + m.count;
    Element *x = (Element *)(((uintptr_t)(ranks + m.count) + 63) & ~(uintptr_t)63), *middle = x + ahead;
    const long expert = (long)m.first[0]->outputs * hidden * K::bytes;
    const int threads = n * expert > LITTLE ? c.threads : 1;

    int numbers[CHOSEN];
    float shares[CHOSEN];
    if (!c.numbers) {
        prepare<P>({m.router, c.routed ? c.routed : c.x, nullptr, nullptr, nullptr, 0, 1, 0, 0, 1, {}}, x, ahead);
        const long blocks = (m.count + W - 1) / W;
        const bool many = (long)m.count * hidden * K::bytes > LITTLE;
        share(many ? c.threads : 1, blocks, 1, [&](long block) {
            const int first = block * W, count = m.count - first < W ? m.count - first : W;
            const ProductCall some = {m.router, nullptr, nullptr, nullptr, nullptr, 0, 1, 0, 0, 1, {}};
            Floats found[1];
            multiply<P>(some, x, ahead, first, count, found);
            write_some<Float32>(logits, first, count, found[0]);
        });
        choose(m, logits, ranks, numbers, shares);
    }
    for (int i = 0; i < n; i++) {
        if (c.numbers) numbers[i] = c.numbers[i], shares[i] = c.shares[i];
        shares[i] = Kept<K>::rounded(all(shares[i]))[0];
    }
    if (c.numbers || c.routed)
        prepare<P>({m.router, c.x, nullptr, nullptr, nullptr, 0, 1, 0, 0, 1, {}}, x, ahead);

    const long of_expert = (width + W - 1) / W, block_bytes = expert / of_expert;
    share(threads, n * of_expert, block_bytes < PIECE ? PIECE / (block_bytes + 1) + 1 : 1, [&](long block) {
        const int i = block / of_expert, first = block % of_expert * W;
        const ProductCall some = {m.first[numbers[i]], nullptr, nullptr, nullptr, nullptr, 0, 1, 0, 0, 1, {}};
        const int count = width - first < W ? width - first : W;
        P::keep(middle + (long)i * apart + first, opened<P>(some, m, x, ahead, first, count));
        if (first + W >= width)  // what products read behind the last
            memset(middle + (long)i * apart + width, 0, sizeof(Element) * (apart - width));
    });
    const long blocks = (hidden + W - 1) / W, sums = (long)n * W * width * K::bytes;
    share(threads, blocks, sums < PIECE ? PIECE / (sums + 1) + 1 : 1, [&](long block) {
        const int first = block * W, count = hidden - first < W ? hidden - first : W;
        Floats sum = {}, found[1];
        for (int i = 0; i < n; i++) {
            const ProductCall some = {m.last[numbers[i]], nullptr, nullptr, nullptr, nullptr, 0, 1, 0, 0, 1, {}};
            multiply<P>(some, middle + (long)i * apart, apart, first, count, found);
            sum += shares[i] * found[0];
        }
        if (c.residual)
            sum = read_some<K>(c.residual, first, count) + Kept<K>::rounded(sum);
        write_some<K>(c.out, first, count, sum);
    });
    return 0;
}

}  // namespace

// Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_mixture(const Call *c) {
    const int kind = c->mixture->router->kind;
    if (kind == FLOAT32) return run<Each<Float32>>(*c);
#if defined(HAS_PAIRS)
    if (kind == BFLOAT16) return run<Pairs>(*c);
#else
    if (kind == BFLOAT16) return run<Each<BFloat16>>(*c);
#endif
#if defined(HAS_FLOAT16)
    if (kind == FLOAT16) return run<Each<Float16>>(*c);
#endif
    return 1;
}

extern "C" int omnikv_sizeof_mixture() { return sizeof(Mixture); }
extern "C" int omnikv_sizeof_mixture_call() { return sizeof(Call); }
