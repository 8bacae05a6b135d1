"""Which methods fit a model: not every one knows sliding windows, recurrent layers, latent
attention, capped scores or sinks.
"""

from __future__ import annotations

from engine.base.errors import SettingError
from engine.methods.base import Method
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs


def require_windows(method: Method, plan: LayerPlan, config: ModelConfig) -> None:
    """Raise SettingError where a model has sliding-window or recurrent layers, latent attention, a
    cap on attention scores or sinks, and the method, whose layer plan for it is `plan`, knows none
    (Needs.sliding, recurrent, latent, capped).
    """
    needs = method.needs(plan, config, config.max_positions, itemsize=4)
    name = getattr(method, "method", method).name  # in exact mode the drafter's
    if config.local_layers and not needs.sliding:
        raise SettingError(
            f"{name}: does not know the sliding-window layers of this model "
            f"({config.family}); use full or omnikv"
        )
    if config.recurrent is not None and not needs.recurrent:
        raise SettingError(
            f"{name}: does not know the recurrent layers of this model ({config.family}); use full "
            "or omnikv" + (" without settings of its own for prompts" if needs.own_prompts else "")
        )
    if config.latent and not needs.latent:
        raise SettingError(
            f"{name}: does not know the latent attention of this model ({config.family}), where "
            "one row is K and V of all heads; use full or omnikv"
        )
    for has, what in (
        (config.block.score_cap, "the cap on attention scores"),
        (config.block.sinks, "the attention sinks"),
    ):
        if has and not needs.capped:
            raise SettingError(
                f"{name}: does not know {what} of this model ({config.family}); use full or omnikv"
            )


def require_one_rope(method: Method, config: ModelConfig) -> None:
    """Raise SettingError where K cannot be turned back to position 0 by one rope: of a rotation
    that depends on the length, or ropes that differ between layers.
    """
    if config.rope.kind == "dynamic":
        raise SettingError(
            f"{method.name}: this model's rope is dynamic NTK, whose rotations cannot be undone; "
            "use another method"
        )
    if config.layer_ropes:
        raise SettingError(
            f"{method.name}: turns rows back by one rope, found layers with different ones "
            f"({config.family}); use another method"
        )


def validate_parts(method: Method, needs: Needs, more: bool, last: int | None = None) -> None:
    """Raise SettingError where a prompt cannot be read in several calls (`more`), or its final call
    of `last` tokens is too short.
    """
    if more and needs.final_call is None:
        raise SettingError(
            f"{method.name}: reads a whole prompt in one call, found a prefill with more=True"
        )
    if last is not None and last < (needs.final_call or 0):
        raise SettingError(
            f"{method.name}: treats the last {needs.final_call} tokens of a prompt differently, so "
            f"the final prefill call must have at least {needs.final_call} tokens (found {last})"
        )
