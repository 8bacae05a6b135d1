"""Retrieval that needs a step first: 2StageRetr (OmniKV's own task), chains of variables, RULER's
variable tracking.
"""

from random import Random

from tools.tasks.draft import Draft, Task, slots
from tools.tasks.words import COLORS, digits, distinct, filler

RULES = (
    "Below is a dictionary whose keys are integers and whose values are colors. First compute "
    "the sum, "
    "then find the color that corresponds to the sum in the dictionary.\n"
)
# keys 0..999: at most three digits; longer documents carry unrelated sentences before the
# dictionary
MAX_KEYS = 1000
PAPER_KEYS = 200  # as many as the paper's own dictionaries have at most


def _dictionary(rng: Random, pieces: int, most: int = MAX_KEYS) -> tuple[Draft, int, list[str]]:
    keys = min(pieces, most)
    colors = [rng.choice(COLORS) for _ in range(keys)]
    start = pieces - keys
    draft = Draft(head=RULES, pieces=[filler(rng) + "\n" for _ in range(start)])
    draft.pieces += [f"{key}: {color}\n" for key, color in enumerate(colors)]
    return draft, start, colors


def _addends(rng: Random, total: int) -> tuple[int, int]:
    b = rng.randint(1, min(20, total)) if total else 0
    return total - b, b


def _keys(rng: Random, pieces: int, keys: int, questions: int, depth: float | None) -> list[int]:
    """Keys that are asked for; `depth` is one in the whole document."""
    if depth is not None:
        depth = max(0.0, (depth * (pieces - 1) - (pieces - keys)) / max(1, keys - 1))
    return slots(rng, keys, questions, depth)


def _ask(draft: Draft, start: int, colors: list[str], a: int, b: int) -> None:
    """Ask for the sum first, then for its color."""
    key = a + b
    draft.ask(
        f"{a} + {b} = ? Please print the sum first, and then the corresponding color.",
        f"{a} + {b} = {key}, the corresponding color is {colors[key]}",
        f"{key}, the corresponding color is {colors[key]}",
        [start + key],
    )


def two_stage(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """2StageRetr with chain of thought: print the sum first, then the color. Addends 1..20 (b), a =
    key - b.
    """
    draft, start, colors = _dictionary(rng, pieces)
    for key in _keys(rng, pieces, len(colors), questions, depth):
        _ask(draft, start, colors, *_addends(rng, key))
    return draft


def two_stage_paper(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """2StageRetr as the OmniKV paper makes it (its appendix A): at most 200 entries, 23 colors, the
    key uniform, the first addend uniform from 0 to the key. A longer document has sentences before.
    The paper's own wording is not at hand: the words are two_stage's.
    """
    draft, start, colors = _dictionary(rng, pieces, PAPER_KEYS)
    for key in _keys(rng, pieces, len(colors), questions, depth):
        a = rng.randint(0, key)
        _ask(draft, start, colors, a, key - a)
    return draft


def two_stage_direct(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """2StageRetr without chain of thought: the color only."""
    draft, start, colors = _dictionary(rng, pieces)
    for key in _keys(rng, pieces, len(colors), questions, depth):
        a, b = _addends(rng, key)
        draft.ask(
            f"{a} + {b} = ? Please print the corresponding color directly.",
            colors[key],
            colors[key],
            [start + key],
        )
    return draft


def chains(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """Variables defined by numbers or by other variables, shuffled; the answer walks the chain of
    one to three steps down.
    """
    names = distinct(
        lambda: f"{rng.choice('abcdefghijklmnopqrstuvwxyz')}{rng.randrange(100, 1000)}", pieces
    )
    parent: list[int | None] = []
    level: list[int] = []
    for index in range(pieces):
        # about a third are numbers; the others refer to an earlier variable at most three steps
        # above a number
        above = rng.randrange(index) if index and rng.random() < 0.65 else None
        if above is not None and level[above] >= 3:
            above = None
        parent.append(above)
        level.append(0 if above is None else level[above] + 1)
    values = [digits(rng, 5) for _ in names]
    asked = rng.sample([i for i in range(pieces) if level[i]] or [0], k=1)
    pool = [i for i in range(pieces) if level[i] and i != asked[0]]
    asked += rng.sample(pool, min(len(pool), questions - 1))
    while len(asked) < questions:
        asked.append(rng.choice([i for i in range(pieces) if i not in asked]))
    order = list(range(pieces))
    rng.shuffle(order)
    place = [0] * pieces
    for where, index in enumerate(order):
        place[index] = where
    if depth is not None:
        want = min(pieces - 1, round(depth * (pieces - 1)))
        other, mine = order[want], asked[0]
        place[other], place[mine] = place[mine], want
        order[place[other]], order[want] = other, mine
    draft = Draft(head="Variables:\n")
    draft.pieces = [
        f"VAR {names[i]} = {values[i] if parent[i] is None else names[parent[i]]}\n" for i in order
    ]
    for index in asked:
        walk, at = [], index
        while at is not None:
            walk.append(at)
            at = parent[at]
        value = values[walk[-1]]
        draft.ask(
            f"What is the value of {names[index]}?",
            " = ".join(names[i] for i in walk) + f" = {value}",
            value,
            [place[i] for i in walk],
        )
    return draft


def variable_tracking(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """RULER's variable tracking: chains in order among noise; list every variable that holds a
    value.
    """
    draft = Draft(pieces=[filler(rng) + "\n" for _ in range(pieces)])
    names = distinct(
        lambda: f"{rng.choice('abcdefghijklmnopqrstuvwxyz')}{rng.randrange(100, 1000)}",
        4 * questions,
    )
    places = slots(rng, pieces, 4 * questions, depth)
    for index, value in enumerate(distinct(lambda: digits(rng, 5), questions)):
        mine = sorted(places[4 * index : 4 * index + 4])
        ours = names[4 * index : 4 * index + 4]
        for step, where in enumerate(mine):
            draft.pieces[where] = f"VAR {ours[step]} = {value if step == 0 else ours[step - 1]}\n"
        listed = ", ".join(ours)
        draft.ask(
            f"Find all variables that are assigned the value {value}.",
            f"{value}: {listed}",
            listed,
            mine,
        )
    return draft


TASKS = [
    Task("two_stage", "2StageRetr with chain of thought (addends 1..20)", two_stage, 3),
    Task(
        "two_stage_direct",
        "2StageRetr without chain of thought",
        two_stage_direct,
        3,
        trained=False,
    ),
    Task(
        "two_stage_paper",
        "2StageRetr as the OmniKV paper makes it: 200 entries at most, uniform addends",
        two_stage_paper,
        3,
        trained=False,
    ),
    Task("chains", "variables that refer to variables, one to three steps", chains, 6),
    Task(
        "variable_tracking",
        "RULER variable tracking: list the four variables of one chain",
        variable_tracking,
        4,
        4,
        trained=False,
    ),
]
