"""The rules of methods in which few layers choose for all, in float64 and one token at a time."""

import torch

SCALE = 0.25  # of head_dim 16


def softmax_of(q, k):
    """Weights [Hkv, G, n] float64 of one query. q [H, D]; k [Hkv, n, D]."""
    heads = q.double().view(k.shape[0], -1, k.shape[2])
    return torch.softmax(torch.einsum("hgd,hnd->hgn", heads, k.double()) * SCALE, -1)


def kascade(q, k, count):
    """One ascending list per K/V head: the highest sums over its group of the softmax."""
    return best(softmax_of(q, k).sum(1), count)


def hshare(q, k, budget, sinks, recent):
    """(one ascending list per K/V head, first of the newest) of a step that chooses: the first
    tokens and, of those before the newest, the highest sums over a group of the softmax.
    """
    tail = max(0, k.shape[1] - recent)
    between = softmax_of(q, k).sum(1)[:, sinks : max(sinks, tail)]
    chosen = best(between, budget - sinks - recent)
    first = list(range(min(sinks, tail)))
    return [[*first, *(place + sinks for place in row)] for row in chosen], tail


def omnikv_heads(q, k, count, stop):
    """One ascending list per K/V head of positions below stop: the highest maxima in its group."""
    return best(softmax_of(q, k).amax(1)[:, :stop], count)


def best(scores, count):
    """Per row the positions of the highest scores, ascending."""
    kept = min(count, scores.shape[1])
    return [sorted(row.topk(kept).indices.tolist()) for row in scores]


def less_is_more(q, k, budget, recent, sinks):
    """(list, first of the newest): first tokens, and what the heads name in turn."""
    n = k.shape[1]
    chosen = int(budget * (1 - recent))
    newest = budget - chosen
    sinks = sinks if newest >= sinks else 0
    newest -= sinks
    scores = softmax_of(q, k).flatten(0, 1)[:, sinks : n - newest]
    ranked = scores.argsort(1, descending=True).tolist()
    named = []
    for place in range(scores.shape[1]):
        for head in ranked:
            if head[place] + sinks not in named and len(named) < chosen:
                named.append(head[place] + sinks)
    return sorted([*range(sinks), *named]), n - newest


def delta(q, k, page, pages, recent):
    """Ascending pages: the newest `recent` ones, and of the others those with the highest sums of
    the maxima over all heads.
    """
    n = k.shape[1]
    highest = softmax_of(q, k).flatten(0, 1).amax(0)
    sums = torch.stack([part.sum() for part in highest.split(page)])
    older = max(0, -(-n // page) - recent)
    kept = min(max(0, pages - recent), older)
    return sorted([*sums[:older].topk(kept).indices.tolist(), *range(older, len(sums))])
