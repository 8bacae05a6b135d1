"""What a family's attention does beside softmax(scale * q . k): a cap on logits (Gemma 2, section
2 of arXiv 2408.00118), sinks (gpt-oss, as in arXiv 2309.17453, learned), and how finely a prompt's
queries are rounded.

A cap changes every logit, so each kernel applies it, as a constant: without one it compiles to
nothing. A sink is one more term of the softmax's sum, so it joins where a query's partial results
are merged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.launch.triton import tl, triton


@dataclass(frozen=True, eq=False)
class Softmax:
    """cap: logits become cap * tanh(logits / cap); 0: they stay. sinks: float32 [H], a logit under
    each query head that counts in the sum and brings no value; None: there is none. query_bits: 8
    lets a kernel of prompts round queries that meet int8 rows to 8 bits, under one scale a query
    and head, where that is faster (kernels/prefill/native.py); 16: none does. Raises ValueError for
    another number of bits.
    """

    cap: float = 0.0
    sinks: torch.Tensor | None = None
    query_bits: int = 16

    def __post_init__(self) -> None:
        if self.query_bits not in (8, 16):
            raise ValueError(f"query_bits is 8 or 16, not {self.query_bits}")

    @property
    def plain(self) -> bool:
        """Whether there is neither cap nor sink."""
        return not self.cap and self.sinks is None

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Cap scaled logits in place."""
        if self.cap:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits

    def of_heads(self, heads: slice) -> Softmax:
        """Return this for some of the query heads."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[heads])

    def sunk(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the sinks join attention over all rows: out [.., H, D] and its log-sum-exp [.., H]
        float32 -> the same with them.
        """
        if self.sinks is None:
            return out, lse
        total = torch.logaddexp(lse, self.sinks)
        return (out.float() * torch.exp(lse - total).unsqueeze(-1)).to(out.dtype), total

    def launch(self) -> dict[str, float | bool]:
        """Return the constants of a kernel's launch."""
        return dict(CAP=self.cap, SINKS=self.sinks is not None)

    def pointer(self, other: torch.Tensor) -> torch.Tensor:
        """Return the sinks, or a tensor that stands where a kernel reads none."""
        return other if self.sinks is None else self.sinks

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Softmax of capped and masked logits [.., H, n] float32 over their last dimension."""
        if self.sinks is None:
            return torch.softmax(logits, dim=-1)
        sinks = self.sinks.unsqueeze(-1).expand(*logits.shape[:-1], 1)
        return torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., :-1]

    def grouped(self, logits: torch.Tensor) -> torch.Tensor:
        """As `weights`, of logits [Hkv, G, Q, n]."""
        if self.sinks is None:
            return logits.softmax(-1)
        lse = self.joined(logits.logsumexp(-1, keepdim=True))
        return (logits - lse).exp()

    def joined(self, lse: torch.Tensor) -> torch.Tensor:
        """Let the sinks join log-sum-exps [Hkv, G, Q, 1] float32."""
        if self.sinks is None:
            return lse
        return torch.logaddexp(lse, self.sinks.view(*lse.shape[:2], 1, 1))


PLAIN = Softmax()


@triton.jit
def capped(logits, CAP: tl.constexpr):
    """Return CAP * tanh(logits / CAP), the logits where CAP is 0: tanh(y) is 1 - 2 / (e^2y + 1)."""
    if CAP > 0:
        logits = CAP - (2 * CAP) / (tl.exp2(logits * (2.8853900817779268 / CAP)) + 1.0)
    return logits


@triton.jit
def add_sink(m, total, acc, sinks, head, live):
    """Let the sinks of query heads [R] join an online softmax: m, total [R], acc [R, D]."""
    sink = tl.load(sinks + head, mask=live, other=float("-inf"))
    top = tl.maximum(m, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2((m - base) * 1.4426950408889634)
    total = total * shrink + tl.exp2((sink - base) * 1.4426950408889634)
    return top, total, acc * shrink[:, None]
