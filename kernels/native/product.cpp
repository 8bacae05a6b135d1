// Products of a decode step: rows times a weight of floats (product.h), shared by a team.
#include "product.h"
#include "scratch.h"

namespace {

typedef ProductCall Call;

// Returns 0, or 2 without memory for the inputs.
template <class P>
static int run(const Call &c) {
    static thread_local Scratch scratch;
    const Matrix &m = *c.matrix;
    const int outputs = c.gated ? m.outputs / 2 : m.outputs;
    const int ahead = (m.inputs + 2 * P::width - 1) / (2 * P::width) * (2 * P::width);
    typedef typename P::Element Element;
    Element *x = (Element *)scratch.get(sizeof(Element) * ahead * (c.rows + MOST - 1) / MOST * MOST);
    if (!x) return 2;
    prepare<P>(c, x, ahead);
    const bool many = c.threads > 1 && (long)m.outputs * m.inputs * P::Kind::bytes > LITTLE;
    const long blocks = (outputs + W - 1) / W, of_block = (long)W * m.inputs * P::Kind::bytes;
    share(many ? c.threads : 1, blocks, of_block < PIECE ? PIECE / of_block : 1, [&](long block) {
        const int first = block * W;
        for (int r = 0; r < c.rows; r += MOST) {
            const long at = (long)r * outputs, bytes = P::Kind::bytes;
            Call some = c;
            some.rows = c.rows - r < MOST ? c.rows - r : MOST;
            some.residual = c.residual ? c.residual + at * bytes : nullptr;
            some.out = c.out + at * (c.wide ? 4 : bytes);
            finish<P>(some, x + (long)r * ahead, ahead, first, outputs - first < W ? outputs - first : W);
        }
    });
    return 0;
}

}  // namespace

// Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_product(const Matrix *matrix, const char *x, const char *norm, float eps,
                              const char *residual, char *out, int rows, int gated, int wide, int threads,
                              int wide_norm, float offset) {
    const Call c = {matrix, x, norm, residual, out, eps, rows, gated, wide, threads, {wide_norm, offset}};
    if (matrix->kind == FLOAT32) return run<Each<Float32>>(c);
#if defined(HAS_PAIRS)
    if (matrix->kind == BFLOAT16) return run<Pairs>(c);
#else
    if (matrix->kind == BFLOAT16) return run<Each<BFloat16>>(c);
#endif
#if defined(HAS_FLOAT16)
    if (matrix->kind == FLOAT16) return run<Each<Float16>>(c);
#endif
    return 1;
}

extern "C" int omnikv_sizeof_matrix() { return sizeof(Matrix); }
