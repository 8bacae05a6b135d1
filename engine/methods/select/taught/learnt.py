"""A tensor of every choosing layer that a sample of the model says."""

from __future__ import annotations

import torch

from engine.methods.base import Found, Setup
from engine.plan.layers import LayerPlan


class Learnt:
    """Rows `into` [groups, ...], the first of what `found` makes of the layers' queries and keys
    (kept with the model by `name`): there once `ready` was called.
    """

    def __init__(
        self, setup: Setup, plan: LayerPlan, into: torch.Tensor, name: str, found: Found
    ) -> None:
        self._setup, self._plan, self._into = setup, plan, into
        self._name, self._found, self._there = name, found, False

    def ready(self) -> None:
        """Have the sample read, before a chunk takes memory: or, where rows were read under another
        method, by the first step.
        """
        if self._there or not self._plan.groups:
            return
        assert self._setup.sample is not None, "a model to learn from"
        found = self._setup.sample(self._name, self._found)
        for group, own in enumerate(self._plan.groups):
            self._into[group] = found[own.filter_layer][..., : self._into.shape[-1]]
        self._there = True

    def take(self, other: Learnt) -> None:
        """Copy what another one has."""
        if other._there:
            self._into.copy_(other._into)
            self._there = True
