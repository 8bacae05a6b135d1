// The numbers of what rows and weights hold, one list for all kernels: kernels/native/kinds.py has
// the same.
#pragma once

namespace {

enum Kind {
    FLOAT32 = 0,
    BFLOAT16 = 1,
    FLOAT16 = 2,
    INT8 = 3,         // rows of kernels/rows/int8.py
    INT4 = 4,         // rows of kernels/rows/int4.py, of K and of V
    FP8 = 5,          // rows of kernels/rows/fp8.py
    INT4_KEYS = 6,    // where K and V are told apart
    INT4_VALUES = 7,
};

}  // namespace
