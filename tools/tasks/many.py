"""Skills that need many evidence tokens per answer: counting, listing, the most frequent value."""

from random import Random

from tools.tasks.draft import Draft, Task, slots
from tools.tasks.words import ADJECTIVES, COLORS, ITEMS, NOUNS, TOPICS, distinct, people


def _items(rng: Random, count: int) -> list[str]:
    if count <= len(ITEMS) // 2:
        return rng.sample(ITEMS, count)
    return (
        distinct(lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(ITEMS)}", count)
        if count <= 3000
        else distinct(
            lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(ITEMS)} {rng.randrange(1000)}", count
        )
    )


def _inventory(rng: Random, pieces: int, questions: int, depth: float | None, most: int):
    """Items with colors; the asked colors stand 1..most times, the other items share the colors not
    asked about.
    """
    count = min(questions, len(COLORS) - 4)
    colors = rng.sample(COLORS, len(COLORS))
    asked, rest = colors[:count], colors[count:]
    sizes = [rng.randint(1, most) for _ in asked]
    while sum(sizes) > pieces:
        sizes[sizes.index(max(sizes))] -= 1
    places = slots(rng, pieces, sum(sizes), depth)
    items, color = _items(rng, pieces), [rng.choice(rest) for _ in range(pieces)]
    groups, at = [], 0
    for name, size in zip(asked, sizes, strict=True):
        group = sorted(places[at : at + size])
        at += size
        for place in group:
            color[place] = name
        groups.append((name, group))
    form = rng.choice(("{0}: {1}\n", "The {0} is {1}.\n", "- {0}, {1}\n"))
    draft = Draft(
        head="Inventory:\n", pieces=[form.format(i, c) for i, c in zip(items, color, strict=True)]
    )
    return draft, items, groups


def listing(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """All items of a color, in the order of the document."""
    draft, items, groups = _inventory(rng, pieces, questions, depth, 5)
    for name, group in groups:
        listed = ", ".join(items[i] for i in group)
        draft.ask(
            rng.choice((f"List all items that are {name}.", f"Which items are {name}?")),
            f"{name}: {listed}",
            listed,
            group,
        )
    return draft


def counting(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """How many items have a color: one to nine."""
    draft, _, groups = _inventory(rng, pieces, questions, depth, 9)
    for name, group in groups:
        draft.ask(
            rng.choice((f"How many items are {name}?", f"Count the {name} items.")),
            f"{name}: {len(group)}",
            str(len(group)),
            group,
        )
    return draft


def frequent(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """Votes on several topics, asked which option got the most: the winner has at least 1.4 times
    the second's votes.
    """
    topics = rng.sample(sorted(TOPICS), min(questions, len(TOPICS)))
    per_topic = [pieces // len(topics) + (i < pieces % len(topics)) for i in range(len(topics))]
    voters, lines, winners = people(rng, min(pieces, 60)), [], []
    for topic, total in zip(topics, per_topic, strict=True):
        options = rng.sample(TOPICS[topic], min(rng.randint(3, 6), max(2, total // 2)))
        top = max(2, round(total * rng.uniform(1.6, 2.2) / (len(options) + 1)))
        top = min(top, total)
        cap = max(1, int(top / 1.4))
        votes, left = [options[0]] * top, total - top
        # too few rivals to spread the rest below the cap: the winner takes it
        while left > cap * (len(options) - 1):
            votes.append(options[0])
            left -= 1
        counts = {option: 0 for option in options[1:]}
        for _ in range(left):
            option = rng.choice([o for o in options[1:] if counts[o] < cap])
            counts[option] += 1
            votes.append(option)
        winners.append(options[0])
        lines += [(topic, option) for option in votes]
    rng.shuffle(lines)
    form = rng.choice(("{2} wants for {0}: {1}\n", "{0}: {1}\n", "- {2}, {0}: {1}\n"))
    draft = Draft(head="Votes:\n", pieces=[form.format(t, o, rng.choice(voters)) for t, o in lines])
    for topic, winner in zip(topics, winners, strict=True):
        draft.ask(
            rng.choice(
                (f"Which {topic} got the most votes?", f"What is the most frequent {topic}?")
            ),
            f"{topic}: {winner}",
            winner,
            [i for i, (t, o) in enumerate(lines) if (t, o) == (topic, winner)],
        )
    return draft


def common_words(rng: Random, pieces: int, questions: int, depth: float | None) -> Draft:
    """RULER's common and frequent words in one: the three words that stand most often in a list,
    most frequent first.
    """
    pool = rng.sample(NOUNS, min(len(NOUNS), max(8, pieces // 3)))
    a = max(4, round(pieces * 0.3))
    b, c = round(a * 0.65), round(a * 0.4)
    top = pool[:3]
    words = [top[0]] * a + [top[1]] * b + [top[2]] * c
    rest, most = pieces - len(words), max(1, c // 2)
    words += [
        pool[3 + i % min(len(pool) - 3, max(1, -(-rest // most)))] for i in range(max(0, rest))
    ]
    words = words[: max(pieces, a + b + c)]
    rng.shuffle(words)
    draft = Draft(
        head="Words:\n",
        pieces=[f"{word}\n" if rng.random() < 0.2 else f"{word} " for word in words],
    )
    listed = ", ".join(top)
    draft.ask(
        "What are the three most common words in the list?",
        listed,
        listed,
        [i for i, w in enumerate(words) if w in top],
    )
    return draft


TASKS = [
    Task(
        "listing",
        "all items of a color in the order of the document",
        listing,
        6,
        5,
        len(COLORS) - 4,
        trained=False,
    ),
    Task(
        "counting",
        "how many items have a color (1..9)",
        counting,
        10,
        9,
        len(COLORS) - 4,
        trained=False,
    ),
    Task("frequent", "which option got the most votes on a topic", frequent, 8, 6, len(TOPICS)),
    Task(
        "common_words",
        "the three most frequent words of a list, in order",
        common_words,
        16,
        max_questions=1,
        trained=False,
    ),
]
