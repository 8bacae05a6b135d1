// Attention over packed rows: of 8 bits, of 6 and 4, and of 8-bit floats.
#include "attention.h"

// kind: INT8, INT4 or FP8. Returns 0, or 1 for a kind that this build lacks.
extern "C" int omnikv_attend_packed(const Call *c, int kind) {
    if (kind == INT8) attend<Int8, Int8>(*c);
    else if (kind == INT4) attend<Int4Keys, Int4Values>(*c);
#if defined(HAS_FLOAT16)
    else if (kind == FP8) attend<Float8, Float8>(*c);
#endif
    else return 1;
    return 0;
}
