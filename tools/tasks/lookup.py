"""Retrieval: one stated value per question (pass keys, numbers, key-value pairs, needles after
RULER).
"""

from random import Random

from tools.tasks.draft import Draft, Task, slots
from tools.tasks.words import (
    ADJECTIVES,
    CLASSIC_NOISE,
    ITEMS,
    NOUNS,
    digits,
    distinct,
    filler,
    people,
)


def noise(rng: Random, count: int) -> list[str]:
    """`count` pieces of unrelated text: the classic repeated sentences, or random prose."""
    if rng.random() < 0.5:
        return [CLASSIC_NOISE] * count
    return [filler(rng) + ("\n" if rng.random() < 0.3 else " ") for _ in range(count)]


def passkey(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """InfiniteBench's pass key for one question; with more questions each key belongs to a named
    person.
    """
    draft = Draft(
        head="There is important information hidden in this text. Find it and memorize it.\n",
        pieces=noise(rng, pieces),
    )
    places = slots(rng, pieces, questions, depth)
    if questions == 1 and rng.random() < 0.7:
        key = digits(rng, 5)
        draft.pieces[places[0]] = f"The pass key is {key}. Remember it. {key} is the pass key.\n"
        draft.ask("What is the pass key?", f"The pass key is {key}.", key, places)
        return draft
    for place, name, key in zip(
        places, people(rng, questions), distinct(lambda: digits(rng, 5), questions), strict=True
    ):
        draft.pieces[place] = f"The pass key of {name} is {key}. Remember it.\n"
        draft.ask(
            f"What is the pass key of {name}?", f"The pass key of {name} is {key}.", key, [place]
        )
    return draft


def number_string(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """InfiniteBench's number string: ten digits, many of them repeated."""
    draft = Draft(
        head="There is important information hidden in this text. Find it and memorize it.\n",
        pieces=noise(rng, pieces),
    )
    place = slots(rng, pieces, 1, depth)[0]
    number = ""
    while len(number) < 10:
        number = (number + rng.choice("0123456789") * rng.randint(1, 4))[:10]
    draft.pieces[place] = (
        f"The sequence of digits is {number}. Remember it. {number} is the sequence of digits.\n"
    )
    draft.ask(
        "What is the sequence of digits?", f"The sequence of digits is {number}.", number, [place]
    )
    return draft


def key_value(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """A table of pairs, all alike; keys and values are numbers or words, lines plain or JSON."""
    kind, style = rng.random(), rng.randrange(3)
    if kind < 0.7:
        keys = distinct(lambda: digits(rng, 6), pieces)
    elif kind < 0.85 and pieces < 3000:  # of 12,000 such keys
        keys = distinct(lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(ITEMS)}", pieces)
    else:
        keys = distinct(lambda: f"{rng.choice(ITEMS)}-{rng.randrange(1000)}", pieces)
    values = (
        [digits(rng, 6) for _ in keys]
        if rng.random() < 0.8
        else [f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in keys]
    )
    form = ("{0}: {1}\n", '"{0}":"{1}",\n', "{0} = {1}\n")[style]
    draft = Draft(
        head=("Extract the value of the key from the data below.\n", "JSON data:\n{\n", "Table:\n")[
            style
        ]
    )
    draft.pieces = [form.format(key, value) for key, value in zip(keys, values, strict=True)]
    draft.foot = "}\n" if style == 1 else ""
    tell = form.strip(",\n")  # the entry as the table has it
    ask = rng.choice(("What is the value of {0}?", "Key: {0}", "Give me the value of the key {0}."))
    for place in slots(rng, pieces, questions, depth):
        draft.ask(
            ask.format(keys[place]), tell.format(keys[place], values[place]), values[place], [place]
        )
    return draft


def key_value_uuid(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """InfiniteBench's key-value retrieval word for word: a JSON object of random UUIDs."""

    def code() -> str:
        return "-".join(
            "".join(rng.choice("0123456789abcdef") for _ in range(k)) for k in (8, 4, 4, 4, 12)
        )

    keys, values = distinct(code, pieces), distinct(code, pieces)
    draft = Draft(
        head="Extract the value corresponding to the specified key in the JSON object "
        "below.\n\nJSON data:\n{",
        foot="}\n",
    )
    draft.pieces = [
        f'"{k}": "{v}"' + (", " if i + 1 < pieces else "")
        for i, (k, v) in enumerate(zip(keys, values, strict=True))
    ]
    for place in slots(rng, pieces, questions, depth):
        draft.ask(
            f'Key: "{keys[place]}"', f'"{keys[place]}": "{values[place]}"', values[place], [place]
        )
    return draft


def _needle(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}.\n"


def _magic_keys(rng: Random, count: int) -> list[str]:
    return distinct(lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}", count)


def needle(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """RULER's needle: one sentence per question in unrelated text."""
    return _needles(rng, noise(rng, pieces), questions, depth)


def needle_multi_key(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """RULER's multi-key needle: every sentence is a needle, one of them is asked for."""
    keys = (
        _magic_keys(rng, pieces)
        if pieces <= 4000
        else distinct(
            lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}-{rng.randrange(1000)}", pieces
        )
    )
    values = [digits(rng, 7) for _ in keys]
    draft = Draft(pieces=[_needle(k, v) for k, v in zip(keys, values, strict=True)])
    for place in slots(rng, pieces, questions, depth):
        _ask_needle(draft, keys[place], values[place], place)
    return draft


def _ask_needle(draft: Draft, key: str, value: str, place: int) -> None:
    draft.ask(
        f"What is the special magic number for {key} mentioned in the provided text?",
        _needle(key, value).strip(),
        value,
        [place],
    )


def _needles(rng: Random, pieces: list[str], questions: int, depth: float | None) -> Draft:
    draft = Draft(pieces=pieces)
    for place, key in zip(
        slots(rng, len(pieces), questions, depth), _magic_keys(rng, questions), strict=True
    ):
        value = digits(rng, 7)
        draft.pieces[place] = _needle(key, value)
        _ask_needle(draft, key, value, place)
    return draft


def needle_multi_value(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """RULER's multi-value needle: one key with two to four values, asked for in the order of the
    text.
    """
    draft = Draft(pieces=noise(rng, pieces))
    share = min(4, pieces // questions)
    places = slots(rng, pieces, share * questions, depth)
    for index, key in enumerate(_magic_keys(rng, questions)):
        mine = sorted(places[index * share : (index + 1) * share][: rng.randint(2, share)])
        values = distinct(lambda: digits(rng, 7), len(mine))
        for place, value in zip(mine, values, strict=True):
            draft.pieces[place] = _needle(key, value)
        listed = ", ".join(values)
        draft.ask(
            f"What are all the special magic numbers for {key} mentioned in the provided text?",
            f"The special magic numbers for {key} are {listed}.",
            listed,
            mine,
        )
    return draft


def needle_multi_query(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """RULER's multi-query needle: several keys asked for in one question."""
    draft = Draft(pieces=noise(rng, pieces))
    count = min(pieces, max(4, questions * 2))
    places, keys = slots(rng, pieces, count, depth), _magic_keys(rng, count)
    values = distinct(lambda: digits(rng, 7), count)
    for place, key, value in zip(places, keys, values, strict=True):
        draft.pieces[place] = _needle(key, value)
    for index in range(questions):
        ours = rng.sample(range(count), min(count, rng.randint(2, 4)))
        if index == 0 and 0 not in ours:
            ours[0] = 0
        wanted = ", ".join(keys[i] for i in ours)
        listed = ", ".join(f"{keys[i]}: {values[i]}" for i in ours)
        draft.ask(
            f"What are the special magic numbers for {wanted} mentioned in the provided text?",
            listed,
            listed,
            [places[i] for i in ours],
        )
    return draft


TASKS = [
    Task("passkey", "a five-digit pass key in repeated noise (InfiniteBench)", passkey),
    Task(
        "number_string",
        "a ten-digit sequence in noise (InfiniteBench)",
        number_string,
        max_questions=1,
    ),
    Task(
        "kv",
        "one value of a table of like pairs, with keys and values of one to three tokens",
        key_value,
        4,
    ),
    Task(
        "kv_uuid",
        "InfiniteBench's key-value retrieval: a JSON object of UUIDs",
        key_value_uuid,
        2,
        trained=False,
    ),
    Task("needle", "RULER single needle", needle),
    Task("needle_multi_key", "RULER needle among needles of other keys", needle_multi_key, 4),
    Task(
        "needle_multi_value",
        "RULER: all values of one key, in the order of the text",
        needle_multi_value,
        4,
        4,
        trained=False,
    ),
    Task(
        "needle_multi_query",
        "RULER: the values of several keys at once",
        needle_multi_query,
        6,
        2,
        trained=False,
    ),
]
