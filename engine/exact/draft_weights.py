"""A copy of a model's weights in int8, for drafts alone: verification reads the model's own.

A draft of a few thousand rows waits for the weights, so half the bytes are nearly half the time.
What the copy says is only guessed. Source of the idea: QuantSpec (Tiwari et al., 2025, arXiv
2502.10424) drafts with weights and a cache in four bits.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import SettingError
from engine.forward.layer import LayerForm
from engine.forward.self_test import StepForms
from engine.load.loaded import Loaded
from engine.model.llama import Llama, Matrix
from engine.model.low_bits import rounded
from engine.plan.draft_weights import COPY, copied
from kernels.layer.linear import Linear
from kernels.quant.linear import pack_quantised
from kernels.quant.native import usable


def copied_layers(loaded: Loaded, backend: str) -> LayerForm:
    """The form of a step on the int8 copy of the weights, made when it is first asked for. Raises
    SettingError where such a step would gain nothing, or there are no such products.
    """
    if "int8" not in loaded.copies:
        why = _why_not(loaded)
        if why:
            raise SettingError(f"draft_weights: found 'int8', but {why}; leave draft_weights out")
        model = in_int8(loaded.model)
        loaded.copies["int8"] = StepForms(model, loaded.rotary, loaded.pieces, "auto")
    return loaded.copies["int8"](backend)


def _why_not(loaded: Loaded) -> str:
    """Why a model's drafts read no int8 copy; "" where they may."""
    if loaded.device.type != "cpu":
        return f"the weights lie on {loaded.device}, and such drafts run on a CPU"
    if loaded.model.parts or loaded.peers is not None:
        return "the model lies on several devices or processes"
    if loaded.model.staged is not None:
        return "layers of the model stream from host memory"
    if loaded.few_bits is not None:
        return "the weights are in few bits already"
    if not usable():
        return "the C++ kernels that multiply it are not here"
    return ""


def in_int8(model: Llama) -> Llama:
    """The same model with a copy of its matrices in int8, one scale for 32 weights of a row;
    embedding, norms and what no such group divides are the model's own tensors.
    """
    layers = [layer.mapped(_in_int8) for layer in model.layers]
    return replace(model, layers=layers, lm_head=_in_int8(model.lm_head))


def _in_int8(matrix: Matrix) -> Matrix:
    if not isinstance(matrix, Linear) or not copied(matrix.shape[1]):
        return matrix
    assert matrix.form != "packed"  # where there are C++ kernels, weights lie as they came
    weight = matrix.weight.t() if matrix.form == "narrow" else matrix.weight
    return pack_quantised(rounded(weight, COPY), matrix.bias, matrix.dtype)
