// Attention over rows of floats, and what a step has around it. Packed rows are a source of their own:
// two compilers take half the time of one.
#include "attention.h"
#include "rounding.h"
#include "scratch.h"

extern "C" int omnikv_attend_packed(const Call *c, int kind);
extern "C" int omnikv_attend_together(const Call *c, int kind);

// kind: one of kinds.h, of K and V. Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_attend(const Call *c, int kind) {
    const int found = omnikv_attend_together(c, kind);
    if (found != 1) return found;
    if (kind == FLOAT32) attend<Float32, Float32>(*c);
    else if (kind == BFLOAT16) attend<BFloat16, BFloat16>(*c);
#if defined(HAS_FLOAT16)
    else if (kind == FLOAT16) attend<Float16, Float16>(*c);
#endif
    else return omnikv_attend_packed(c, kind);
    return 0;
}

namespace {

constexpr long LITTLE = 1 << 15;  // logits that another thread is not woken for

// scores[t] = the most of logits [heads][ahead] over heads, of exp(logit - lse) where there is an lse.
static void head_most(const float *logits, const float *lse, int heads, long ahead, int rows, int threads,
                      float *scores) {
    const long blocks = (rows + W - 1) / W;
    share((long)rows * heads > LITTLE ? threads : 1, blocks, 64, [&](long block) {
        const int t = block * W;
        if (t + W <= rows) {
            Floats top = all(-INFINITY);
            for (int h = 0; h < heads; h++) {
                const Floats x = load(logits + h * ahead + t);
                top = most(lse ? x - lse[h] : x, top);
            }
            store(scores + t, lse ? exponential(top) : top);
            return;
        }
        for (int i = t; i < rows; i++) {
            float top = -INFINITY;
            for (int h = 0; h < heads; h++) {
                const float x = lse ? logits[h * ahead + i] - lse[h] : logits[h * ahead + i];
                top = x > top ? x : top;
            }
            scores[i] = lse ? exponential(all(top))[0] : top;
        }
    });
}

}  // namespace

// scores[l * apart + t] = the most of logits [lists][heads][ahead] over a list's heads, of exp(logit - lse)
// where there is an lse.
extern "C" void omnikv_head_most(const float *logits, const float *lse, int lists, int heads, long ahead,
                                 int rows, int threads, float *scores, long apart) {
    for (int l = 0; l < lists; l++)
        head_most(logits + l * heads * ahead, lse ? lse + l * heads : nullptr, heads, ahead, rows, threads,
                  scores + l * apart);
}

namespace {

// q and out as a step has them, [queries][heads * group][dim] of a float kind. turned: q is transformed as packed
// rows of K are.
template <class K>
static int attend_heads(const Call &given, int kind, const char *q, char *out, bool turned) {
    static thread_local Scratch scratch;
    const int rows = given.queries * given.group;
    const long total = (long)given.heads * rows * given.dim;
    float *folded = (float *)scratch.get(2 * sizeof(float) * total);
    if (!folded) return 2;
    Call c = given;
    c.q = folded, c.out = folded + total;
    const int run = run_of(given.dim), factor = query_factor(given.dim);
    for (int pass = 0; pass < 2; pass++) {
        if (pass && turned) omnikv_transform(folded, total / given.dim, given.dim, run, factor, given.threads, folded);
        if (const int found = pass ? omnikv_attend(&c, kind) : 0) return found;
        long at = 0;  // in q and out
        for (int j = 0; j < c.queries; j++)
            for (int h = 0; h < c.heads * c.group; h++) {
                const long row = (long)(h / c.group * rows + j * c.group + h % c.group) * c.dim;
                for (int d = 0; d < c.dim; d += W, at += W)
                    if (pass) write_some<K>(out, at, W, load(c.out + row + d));
                    else store(folded + row + d, read_some<K>(q, at, W));
            }
    }
    return 0;
}

}  // namespace

// As omnikv_attend, of q in its own dtype and order; out alike. For packed rows q is transformed here.
extern "C" int omnikv_attend_heads(const Call *c, int kind, const char *q, char *out, int q_kind) {
    const bool turned = kind != FLOAT32 && kind != BFLOAT16 && kind != FLOAT16;
    if (q_kind == FLOAT32) return attend_heads<Float32>(*c, kind, q, out, turned);
    if (q_kind == BFLOAT16) return attend_heads<BFloat16>(*c, kind, q, out, turned);
#if defined(HAS_FLOAT16)
    if (q_kind == FLOAT16) return attend_heads<Float16>(*c, kind, q, out, turned);
#endif
    return 1;
}

// The bindings compare the sizes of their structs with these.
extern "C" int omnikv_sizeof_attention_call() { return sizeof(Call); }
