"""The layers whose matrices lie in host memory, and what bringing them costs: figures of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from engine.base.figures import human

BUFFERS = 2  # on the device: one is multiplied by while the other fills
LEAST = BUFFERS + 1  # streamed layers; the buffers of fewer take as much as they free


@dataclass(frozen=True)
class Staging:
    """Which layers of a model stream.

    layers: ascending. sizes: bytes of the matrices of every layer of the model, their biases with
    them; norms, routers, embeddings and the head stay on the device.
    """

    layers: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes in host memory, which one pass through the model brings over: a decode step, or a
        chunk of a prompt.
        """
        return sum(self.sizes[layer] for layer in self.layers)

    @property
    def buffers(self) -> int:
        """How many buffers the device has."""
        return min(BUFFERS, len(self.layers))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers on the device, each as large as the largest layer that streams."""
        return self.buffers * max((self.sizes[layer] for layer in self.layers), default=0)

    @property
    def named(self) -> str:
        """The layers that stream, or those that do not where these are fewer."""
        rest = [layer for layer in range(len(self.sizes)) if layer not in self.layers]
        if not rest:
            return "all layers"
        if len(rest) < len(self.layers):
            return f"all layers but {', '.join(map(str, rest))}"
        return f"layers {', '.join(map(str, self.layers))}"

    def describe(self) -> str:
        """Describe the division in one line."""
        count = len(self.sizes)
        return (
            f"{count - len(self.layers)} of {count} layers on the device, {len(self.layers)} in "
            f"host memory ({human(self.bytes)})"
        )


def spread(count: int, layers: int) -> tuple[int, ...]:
    """Return `count` of a model's layers, as far apart as they go: a layer that stays lies between
    two that stream, so that transfers run under its work.
    """
    return tuple((2 * i + 1) * layers // (2 * count) for i in range(count))
