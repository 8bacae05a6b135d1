// Layers of a decode step of one token, one behind another in one call. They call what Python calls piece by
// piece, and tell it the same, so bits are the same; but between two pieces nobody waits for Python, whose code
// and objects a layer of many rows has driven out of the caches: 25 microseconds a piece, up to 80 then.
#include "call.h"
#include "kinds.h"
#include "matrix.h"
#include "mixture.h"
#include "panels.h"
#include "rotation.h"

extern "C" int omnikv_product(const Matrix *matrix, const char *x, const char *norm, float eps, const char *residual,
                              char *out, int rows, int gated, int wide, int threads, int wide_norm, float offset);
extern "C" void omnikv_few_bits(const Product *p, int many);
extern "C" int omnikv_normalize(const char *x, const char *weight, char *out, int kind, int rows, int size, float eps,
                                int wide, float offset, int threads);
extern "C" int omnikv_act_rows(const char *made, char *out, int kind, int rows, int inputs, int threads, int activation,
                               float limit, float alpha);
extern "C" int omnikv_add_scaled(const char *x, const char *part, float factor, char *out, int kind, int count);
extern "C" int omnikv_mixture(const MixtureCall *c);
extern "C" int omnikv_rotate_store(const Rotation *c, int kind);
extern "C" int omnikv_attend_heads(const Call *c, int kind, const char *q, char *out, int q_kind);
extern "C" void omnikv_head_most(const float *logits, const float *lse, int lists, int heads, long ahead, int rows,
                                 int threads, float *scores, long apart);
extern "C" void omnikv_topk(const float *scores, long stride, int rows, int columns, const int32_t *lo,
                            const int32_t *hi, const int32_t *k, int32_t *out, int room, int32_t *counts);

namespace {

enum Choice { READS = 0, SOFTMAX = 1, RAW = 2 };  // what a layer's scores are, where it chooses

struct Held {  // a matrix: of floats, or a product with one of few bits, told all but what a step changes
    const Matrix *floats;
    const Product *few;
};

struct Layer {
    Held qkv, o, gate_up, down;
    const Mixture *mixture;  // in place of the last two, or NULL
    const char *input_norm, *post_norm, *q_norm, *k_norm;  // or NULL
    const char *o_norm, *down_norm;  // of what a half adds, or NULL
    char *k, *v, *ring;                                    // [kv_heads, rows, dim] twice; [slots, heads, dim]
    long key_head, key_row, value_head, value_row;         // strides in bytes
    int32_t *index, *count;  // what it chooses, or what was chosen for it; NULL: neither, it reads everything
    int heads, kv_heads, dim, slots;
    int window, size;        // it sees so many tokens, in a ring of `size` rows that is held twice; 0: all tokens
    int choice;              // of Choice
    int angles;              // which of the step's
    int rows, key_bytes, value_bytes;  // kind of the bank's rows; bytes of one, where they are packed, or 0
    int widths;              // the norms of q and k are of all their heads at once
    int made, activation;    // outputs of gate and up; what lies behind them, as activation.h numbers it
    float scale, cap;        // of logits
    float residual;          // what a half adds is multiplied by
};

struct Angles {
    const float *cos, *sin;  // [pairs]
    long pairs;
};

struct Step {
    const Layer *layers;
    const Angles *angles;
    Held head;                                     // what makes logits behind the last layer
    const char *head_norm, *x;                     // [hidden]
    char *out;                                     // [hidden]: x behind the last layer, and between two
    float *found;                                  // logits [vocab], or NULL: x is all that is asked for
    char *normed, *qkv, *q, *attended, *made, *mixed, *part;  // a layer's own
    float *scratch;                                // of products with few bits
    float *lse, *parts, *logits, *scores;          // of attention; the last two of layers that choose
    const int64_t *position;
    long n, tail;                                  // tokens, the new one too; where the tail of them begins
    int budget, room;                              // tokens to choose; places of an index
    int kind, hidden, split, threads;
    float eps;
    Wide norms;
};

static int normalize(const Step &s, const char *x, const char *norm, char *to, int size) {
    return omnikv_normalize(x, norm, to, s.kind, 1, size, s.eps, s.norms.norm, s.norms.offset, s.threads);
}

// wide: out is float32; a product with few bits was told what its out is.
static int multiply(const Step &s, const Held &m, const char *x, const char *norm, const char *residual, char *out,
                    int gated, int wide = 0) {
    const Wide &norms = s.norms;
    if (m.floats)
        return omnikv_product(m.floats, x, norm, s.eps, residual, out, 1, gated, wide, s.threads, norms.norm,
                              norms.offset);
    if (norm) {
        if (const int found = normalize(s, x, norm, s.normed, s.hidden)) return found;
        x = s.normed;
    }
    Product p = *m.few;
    p.x = x, p.residual = residual, p.out = out, p.scratch = s.scratch, p.gated = gated, p.threads = s.threads;
    omnikv_few_bits(&p, 0);
    return 0;
}

static int rotate(const Step &s, const Layer &l) {
    if (l.widths) {
        const int size = s.kind == FLOAT32 ? 4 : 2, width = l.heads * l.dim;
        if (const int found = normalize(s, s.qkv, l.q_norm, s.qkv, width)) return found;
        char *const k = s.qkv + (long)width * size;
        if (const int found = normalize(s, k, l.k_norm, k, l.kv_heads * l.dim)) return found;
    }
    const Angles &turn = s.angles[l.angles];
    Rotation r = {};
    r.qkv = s.qkv, r.cos = turn.cos, r.sin = turn.sin, r.out = s.q, r.k = l.k, r.v = l.v;
    r.key_head = l.key_head, r.key_row = l.key_row, r.value_head = l.value_head, r.value_row = l.value_row;
    r.ring = l.ring, r.positions = s.position;
    r.batch = r.queries = 1, r.heads = l.heads, r.kv_heads = l.kv_heads, r.dim = l.dim;
    r.pairs = (int)turn.pairs, r.slots = l.slots, r.count = l.size;
    if (l.key_bytes) r.packed = l.rows, r.key_bytes = l.key_bytes, r.value_bytes = l.value_bytes;
    r.eps = s.eps, r.wide = s.norms;
    if (!l.widths) r.q_norm = l.q_norm, r.k_norm = l.k_norm;
    return omnikv_rotate_store(&r, s.kind);
}

// Rows first .. n - 1 of those that lie one behind another, and before them what was chosen.
static int attend(const Step &s, const Layer &l) {
    const bool chosen = l.index && l.choice == READS;
    long first = chosen ? s.tail : 0, stop = s.n;
    if (l.window) {
        first = s.n > l.window ? s.n - l.window : 0;
        stop = first % l.size + (s.n - first), first %= l.size;
    }
    const int kept = chosen ? *l.count : 0;
    Call c = {};
    c.k = l.k, c.v = l.v;
    c.key_head = l.key_head, c.key_row = l.key_row, c.value_head = l.value_head, c.value_row = l.value_row;
    c.index = kept ? l.index : nullptr, c.lse = s.lse, c.parts = s.parts;
    c.logits = l.choice == READS ? nullptr : s.logits;
    c.heads = l.kv_heads, c.queries = 1, c.group = l.heads / l.kv_heads, c.dim = l.dim;
    c.kept = kept, c.start = (int)first, c.visited = (int)(kept + stop - first), c.ahead = c.visited;
    c.split = s.split, c.threads = s.threads, c.shared = 1, c.scale = l.scale, c.cap = l.cap, c.unit = 1;
    return omnikv_attend_heads(&c, l.rows, s.q, s.attended, s.kind);
}

static void choose(const Step &s, const Layer &l) {
    const int rows = (int)s.n, lo = 0, hi = (int)s.tail, k = s.budget;
    omnikv_head_most(s.logits, l.choice == SOFTMAX ? s.lse : nullptr, 1, l.heads, rows, rows, s.threads, s.scores, 0);
    omnikv_topk(s.scores, rows, 1, rows, &lo, &hi, &k, l.index, s.room, l.count);
}

// out = x and `part`, normed and scaled where the layer has it so.
static int add_part(const Step &s, const Layer &l, const char *norm, const char *x) {
    if (norm)
        if (const int found = normalize(s, s.part, norm, s.part, s.hidden)) return found;
    return omnikv_add_scaled(x, s.part, l.residual, s.out, s.kind, s.hidden);
}

// out = x and what the last matrix of a half makes of y.
static int add(const Step &s, const Layer &l, const Held &last, const char *y, const char *norm, const char *x) {
    if (!norm && l.residual == 1) return multiply(s, last, y, nullptr, x, s.out, 0);
    if (const int found = multiply(s, last, y, nullptr, nullptr, s.part, 0)) return found;
    return add_part(s, l, norm, x);
}

// Adds what experts make of `out` to it.
static int add_experts(const Step &s, const Layer &l) {
    const bool alone = !l.down_norm && l.residual == 1;
    const char *x = s.out;
    if (l.post_norm) {
        if (const int found = normalize(s, s.out, l.post_norm, s.normed, s.hidden)) return found;
        x = s.normed;
    }
    const MixtureCall c = {l.mixture, x, nullptr, alone ? s.out : nullptr, alone ? s.out : s.part, nullptr, nullptr, 1,
                           s.threads};
    const int found = omnikv_mixture(&c);
    return found || alone ? found : add_part(s, l, l.down_norm, s.out);
}

// What lies between a half's norm and its last matrix.
static int mix(const Step &s, const Layer &l) {
    if (l.activation == SILU) return multiply(s, l.gate_up, s.out, l.post_norm, nullptr, s.mixed, 1);
    if (const int found = multiply(s, l.gate_up, s.out, l.post_norm, nullptr, s.made, 0)) return found;
    return omnikv_act_rows(s.made, s.mixed, s.kind, 1, l.made, s.threads, l.activation, 0, 0);
}

static int run(const Step &s, const Layer &l, const char *x) {
    if (const int found = multiply(s, l.qkv, x, l.input_norm, nullptr, s.qkv, 0)) return found;
    if (const int found = rotate(s, l)) return found;
    if (const int found = attend(s, l)) return found;
    if (l.choice != READS) choose(s, l);
    // rows of a residual are read where they are written
    if (const int found = add(s, l, l.o, s.attended, l.o_norm, x)) return found;
    if (l.mixture) return add_experts(s, l);
    if (const int found = mix(s, l)) return found;
    return add(s, l, l.down, s.mixed, l.down_norm, s.out);
}

}  // namespace

// Layers first .. stop - 1, and the head where logits are asked for. Returns 0, 1 for a kind that this build lacks,
// or 2 without memory.
extern "C" int omnikv_layers(const Step *s, int first, int stop) {
    const char *x = s->x;
    for (int i = first; i < stop; i++, x = s->out)
        if (const int found = run(*s, s->layers[i], x)) return found;
    return s->found ? multiply(*s, s->head, x, s->head_norm, nullptr, (char *)s->found, 0, 1) : 0;
}

extern "C" int omnikv_sizeof_chained_layer() { return sizeof(Layer); }
extern "C" int omnikv_sizeof_chained_step() { return sizeof(Step); }
