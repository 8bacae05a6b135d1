"""Correct bf16 in Triton's interpreter: without this, tl.dot multiplies bf16 bit patterns and casts
truncate (triton 3.6, 3.7).

Call `install` before running a kernel, in a process with TRITON_INTERPRET=1. It corrects only the
operations that our kernels use: casts, dots and arithmetic on two bf16 operands.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Widen bf16 bits to float32."""
    bits = np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32)
    return (bits << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round x to bf16 bits, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))


def install() -> None:
    """Patch the interpreter once; calling it again changes nothing."""
    if getattr(interpreter, "_bf16_is_right", False):
        return
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    binary = interpreter.InterpreterBuilder.binary_op

    def convert_float(x, source, target, mode):
        if source.scalar == tl.bfloat16 and target.scalar == tl.float32:
            return bf16_to_f32(x)
        if source.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return f32_to_bf16(x)
        return convert(x, source, target, mode)

    def wide(t):
        return bf16_to_f32(t.data) if t.dtype.scalar == tl.bfloat16 else t.data.astype(np.float32)

    def create_dot(self, a, b, d, precision, imprecise):
        if a.dtype.scalar in (tl.bfloat16, tl.float16):
            return interpreter.TensorHandle(
                np.matmul(wide(a), wide(b)).astype(d.data.dtype) + d.data, d.dtype.scalar
            )
        return dot(self, a, b, d, precision, imprecise)

    def binary_op(self, left, right, operation):
        if left.dtype.scalar == tl.bfloat16 and right.dtype.scalar == tl.bfloat16:
            result = operation(bf16_to_f32(left.data), bf16_to_f32(right.data))
            if result.dtype == np.bool_:
                return interpreter.TensorHandle(result, tl.int1)
            return interpreter.TensorHandle(f32_to_bf16(result), tl.bfloat16)
        return binary(self, left, right, operation)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.binary_op = binary_op
    interpreter._bf16_is_right = True
