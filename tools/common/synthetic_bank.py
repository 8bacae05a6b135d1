"""A bank of any depth without reading a prompt: random rows of the model's own scale, so that
decode at a million tokens can be timed.

For benchmarks only: what such a session says means nothing, but every step reads, scores, chooses
and computes as on a real text. Rows are never zeros: zeros tie, make a flat
softmax, and stay in memory that was never written.
"""

import torch

from engine.base.errors import ContextTooLong, SettingError
from kernels.rows.forms import floats, is_packed, key_floats
from tools.common.program import no_program

# tokens that are really read: their rows give the scale of every layer's keys and values
HEAD = 64
# random rows drawn per layer; further tiles are sign-flipped copies with other scores
TILE = 4096


def synthesize(session, n, seed=0):
    """Fill an empty session with n random tokens: the first HEAD are prefilled, the others' rows
    drawn with each layer's own scale.

    n: int, 1 to the session's capacity. Deterministic per seed, model and dtype. Afterwards
    len(session) == n and decode() goes on from there; budgets are fixed as after a prefill of n
    tokens. Raises SettingError on a session that holds tokens, ContextTooLong where n does not fit.
    """
    if len(session):
        raise SettingError(
            f"synthesize: found a session of {len(session)} tokens, expected an empty one"
        )
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise SettingError(f"synthesize: found {n!r}, expected an int of at least 1")
    host = torch.Generator().manual_seed(seed)
    ids = torch.randint(session.loaded.config.vocab_size, (n,), generator=host).tolist()
    if n > session.capacity:
        raise ContextTooLong(
            f"synthesize: {n} tokens do not fit: this session's limit is {session.capacity}"
        )
    head = min(n, HEAD)
    session.prefill(ids[:head])
    try:
        with session.loaded.busy(), torch.inference_mode():
            # tokens are all that a method without rows takes over
            rows = range(session.plan.num_layers if session.runner.needs_rows else 0)
            for layer in rows:
                fill_rows(session.bank, layer, head, n, seed)
    except BaseException:
        session.bank.rewind(head, broken=True)
        raise
    if n > head:
        session.adopt(ids)


def fill_rows(bank, layer, head, n, seed):
    """Draw rows head .. n-1 of a layer: normal, per kv head with the standard deviation of rows 0
    .. head-1 (K and V apart). A sliding-window layer gets the newest that its ring holds.
    """
    ring = bank.window_ring(layer)
    stored = bank.kv(layer, head) if ring is None else ring.views(0, head)
    k, v = (read(t) if is_packed(t) else t for read, t in zip((key_floats, floats), stored))
    first = head if ring is None else max(head, n - ring.size)
    generator = torch.Generator(device=k.device).manual_seed(seed * 1_000_003 + layer)
    most = TILE if ring is None else min(TILE, ring.size)
    tiles = [_tile(rows, min(most, n - first), generator) for rows in (k, v)]
    for start in range(first, n, most):
        count = min(most, n - start)
        if start > first:
            signs = (
                torch.randint(
                    2, (2, 1, 1, *tiles[0].shape[2:]), generator=generator, device=k.device
                )
                .mul_(2)
                .sub_(1)
                .to(k.dtype)
            )
            rows = [tile[:, :count] * sign for tile, sign in zip(tiles, signs)]
        else:
            rows = [tile[:, :count] for tile in tiles]
        bank.write_chunk(layer, *rows, start)


def _tile(rows, count, generator):
    batch, heads, _, dim = rows.shape
    # one order of sums
    deviation = rows.float().contiguous().square().mean(dim=(0, 2, 3)).sqrt().clamp_(min=1e-3)
    noise = torch.randn(batch, count, heads, dim, generator=generator, device=rows.device)
    return (noise * deviation.view(1, 1, heads, 1)).to(rows.dtype)


if __name__ == "__main__":
    raise SystemExit(no_program("tools.common.synthetic_bank"))
