"""EM-LLM's rule in float64, token by token and event by event, as the paper's sections 3.2 to 3.4
tell it: nothing of the engine is called.
"""

import math

import torch


def boundaries(surprises, method):
    """Where events begin by surprise, from the first one at `sink`; a threshold of each token."""
    starts, gap = [method.sink], math.inf
    for token, own in enumerate(surprises):
        before = torch.tensor(surprises[max(0, token - method.window) : token], dtype=torch.float64)
        surprising = False
        if len(before) > 1:
            threshold = before.mean() + method.gamma * before.std(correction=0)
            surprising = bool(own > threshold)
            gap = min(gap, abs(float(own - threshold)))
        if token - starts[-1] == method.most:
            starts.append(token)
        elif surprising and token - starts[-1] >= method.least:
            starts.append(token)
    if len(surprises) - starts[-1] == method.most:
        starts.append(len(surprises))
    return starts, gap


def measure(keys, first, middle, stop, how):
    """Modularity, or less conductance, of parting tokens first .. stop-1 of keys [Hkv, n, D] at
    `middle`: over the whole matrix of similarities.
    """
    k = keys[:, first:stop].double()
    matrix = (k @ k.mT).sum(0)
    side = torch.arange(first, stop) < middle
    degree, weight = matrix.sum(1), matrix.sum()
    if degree[side].sum() <= 0 or degree[~side].sum() <= 0:
        return -math.inf
    if how == "modularity":
        same = side[:, None] == side
        return float(((matrix - degree[:, None] * degree / weight) * same).sum() / weight)
    cut = matrix[side][:, ~side].sum()
    return float(-cut / min(degree[side].sum(), degree[~side].sum()))


def refined(keys, starts, method):
    """The boundaries moved, but for the last one; and the least gap of two places' measures."""
    found, gap = starts[:1], math.inf
    for before, own, after in zip(starts, starts[1:], starts[2:]):
        places = range(max(before + method.least, after - method.most), own + 1)
        if method.refine == "none":
            found.append(own)
            continue
        each = [measure(keys, before, place, after, method.refine) for place in places]
        best = max(range(len(each)), key=lambda i: (each[i], i))
        gap = min([gap, *(each[best] - one for i, one in enumerate(each) if i != best)])
        found.append(places[best])
    return found, gap


def representative(keys, first, stop, count):
    """[Hkv, D]: of each head the mean of the keys that are most like all; and the gap."""
    found, gap = [], math.inf
    for k in keys[:, first:stop].double():
        likeness = k @ k.sum(0)
        order = sorted(range(len(k)), key=lambda i: (-float(likeness[i]), i))
        if count < len(k):
            gap = min(gap, float(likeness[order[count - 1]] - likeness[order[count]]))
        found.append(k[order[:count]].mean(0))
    return torch.stack(found), gap


class Events:
    """A text's events and a queue, over the steps of an answer. keys [Hkv, n, D]."""

    def __init__(self, method):
        self.method, self.queue, self.gap = method, [], math.inf

    def step(self, q, keys, surprises, n, budget):
        """Positions before the window that a step at n tokens reads, of queries q [H, D]."""
        method, tail = self.method, n - self.method.local
        if tail <= budget:
            return list(range(max(0, tail)))
        starts, gap = boundaries(surprises[: n - 1], method)
        bounds, apart = refined(keys, starts, method)
        self.gap = min(self.gap, gap, apart)
        spans, scores = [], []
        for first, stop in zip(bounds, bounds[1:]):
            if first >= tail:
                break
            mean, gap = representative(keys, first, stop, method.representatives)
            self.gap = min(self.gap, gap)
            asked = q.double().view(len(keys), -1, q.shape[1])
            scores.append(float((asked * mean[:, None]).sum()))
            spans.append(range(first, min(stop, tail)))
        assert spans[-1].stop == tail  # every token before the window is in an event
        order = sorted(range(len(spans)), key=lambda i: -scores[i])
        near = math.floor(method.contiguity * (budget - method.sink))
        chosen = self._fit(spans, order, budget - method.sink - near)
        ranked = [scores[i] for i in order]
        self.gap = min([self.gap, *(a - b for a, b in zip(ranked, ranked[1:]))])
        entered = [
            event
            for own in chosen
            for far in range(1, method.reach + 1)
            for event in (own - far, own + far)
            if 0 <= event < len(spans)
        ]
        line = list(dict.fromkeys([*entered, *self.queue]))
        line = [event for event in line if event not in chosen]
        self.queue = self._fit(spans, line, near)
        read = [*range(method.sink)]
        read += [token for event in (*chosen, *self.queue) for token in spans[event]]
        return sorted(read)

    @staticmethod
    def _fit(spans, order, room):
        """The first of these events that fit into so many tokens."""
        found = []
        for event in order:
            room -= len(spans[event])
            if room < 0:
                break
            found.append(event)
        return found
