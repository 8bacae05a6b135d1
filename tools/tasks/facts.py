"""Free-text facts: what people would write about people, projects and shops, each fact in several
phrasings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.tasks.draft import Draft, Task, slots
from tools.tasks.words import (
    CITIES,
    DAYS,
    FOODS,
    INSTRUMENTS,
    ITEMS,
    JOBS,
    MONTHS,
    NOUNS,
    PETS,
    digits,
    filler,
    invented,
    people,
)


@dataclass(frozen=True)
class Relation:
    """One thing that can be said of an entity. {e} is the entity, {v} the value; `answer` is the
    one canonical sentence.
    """

    kind: str
    said: tuple[str, ...]
    asked: tuple[str, ...]
    answer: str
    value: Callable[[Random], str]


def _clock(rng: Random) -> str:
    return f"{rng.randint(6, 22)}:{rng.choice(('00', '15', '30', '45'))}"


def _city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.5 else invented(rng)


def _name(rng: Random) -> str:
    return people(rng, 1)[0]


RELATIONS = (
    Relation(
        "person",
        (
            "{e} works as a {v}.",
            "{e} is a {v} by trade.",
            "For many years {e} has been a {v}.",
            "As a {v}, {e} is well known.",
            "{e} earns a living as a {v}.",
        ),
        ("What is the job of {e}?", "What does {e} do for a living?", "What does {e} work as?"),
        "{e} works as a {v}.",
        lambda r: r.choice(JOBS),
    ),
    Relation(
        "person",
        (
            "{e} lives in {v}.",
            "{e} has a small house in {v}.",
            "These days you can find {e} in {v}.",
            "The home of {e} is in {v}.",
            "{e} moved to {v} last year.",
        ),
        ("Where does {e} live?", "In which city does {e} live?", "What city is {e} in?"),
        "{e} lives in {v}.",
        _city,
    ),
    Relation(
        "person",
        (
            "{e} is {v} years old.",
            "{e} turned {v} this year.",
            "{e} started again at the age of {v}.",
            "{e} (age {v}) was there too.",
        ),
        ("How old is {e}?", "What is the age of {e}?"),
        "{e} is {v} years old.",
        lambda r: str(r.randint(18, 99)),
    ),
    Relation(
        "person",
        (
            "{e} loves to eat {v}.",
            "The favorite food of {e} is {v}.",
            "{e} would eat {v} every day.",
            "If you cook for {e}, make {v}.",
        ),
        ("What is the favorite food of {e}?", "What does {e} like to eat?"),
        "{e} likes to eat {v}.",
        lambda r: r.choice(FOODS),
    ),
    Relation(
        "person",
        (
            "{e} has a {v} at home.",
            "{e} keeps a {v} as a pet.",
            "{e} never goes out without the {v}.",
            "{e} shares the house with a {v}.",
        ),
        ("What pet does {e} have?", "Which animal does {e} keep?"),
        "{e} has a {v}.",
        lambda r: r.choice(PETS),
    ),
    Relation(
        "person",
        (
            "{e} plays the {v}.",
            "{e} took up the {v} at school.",
            "You can hear {e} practise the {v}.",
            "On stage, {e} plays the {v}.",
        ),
        ("What instrument does {e} play?", "What does {e} play?"),
        "{e} plays the {v}.",
        lambda r: r.choice(INSTRUMENTS),
    ),
    Relation(
        "person",
        (
            "{e} was born in {v}.",
            "The birthday of {e} is in {v}.",
            "We celebrate the birthday of {e} every {v}.",
        ),
        ("In which month was {e} born?", "When is the birthday of {e}?"),
        "{e} was born in {v}.",
        lambda r: r.choice(MONTHS),
    ),
    Relation(
        "person",
        (
            "The phone number of {e} is {v}.",
            "You can call {e} at {v}.",
            "To reach {e}, dial {v}.",
            "{e} answers the phone under {v}.",
        ),
        ("What is the phone number of {e}?", "How can I call {e}?"),
        "The phone number of {e} is {v}.",
        lambda r: digits(r, 6),
    ),
    Relation(
        "person",
        (
            "{e} is married to {v}.",
            "{e} and {v} got married in spring.",
            "The spouse of {e} is called {v}.",
        ),
        ("Who is {e} married to?", "What is the name of the spouse of {e}?"),
        "{e} is married to {v}.",
        _name,
    ),
    Relation(
        "project",
        (
            "Project {e} is led by {v}.",
            "Project {e} is in the hands of {v}.",
            "The lead of project {e} is {v}.",
            "To run project {e} we asked {v}.",
        ),
        ("Who leads project {e}?", "Who is in charge of project {e}?"),
        "Project {e} is led by {v}.",
        _name,
    ),
    Relation(
        "project",
        (
            "The budget of project {e} is {v} euros.",
            "Project {e} may spend {v} euros.",
            "For project {e} we set aside {v} euros.",
            "Project {e} costs {v} euros.",
        ),
        ("What is the budget of project {e}?", "How much money does project {e} have?"),
        "The budget of project {e} is {v} euros.",
        lambda r: digits(r, r.choice((4, 5))),
    ),
    Relation(
        "project",
        (
            "The deadline of project {e} is {v}.",
            "Project {e} must be done by {v}.",
            "Project {e} is due on {v}.",
            "We will deliver project {e} on {v}.",
        ),
        ("When is project {e} due?", "What is the deadline of project {e}?"),
        "Project {e} is due on {v}.",
        lambda r: f"{r.choice(MONTHS)} {r.randint(1, 28)}",
    ),
    Relation(
        "project",
        (
            "The password of project {e} is {v}.",
            "To open the files of project {e}, type {v}.",
            "Project {e} is locked with {v}.",
        ),
        ("What is the password of project {e}?", "How do I open the files of project {e}?"),
        "The password of project {e} is {v}.",
        lambda r: f"{r.choice(NOUNS)}{r.randrange(100, 1000)}",
    ),
    Relation(
        "shop",
        (
            "The {e} shop opens at {v}.",
            "You can enter the {e} shop from {v}.",
            "The doors of the {e} shop open at {v}.",
        ),
        ("When does the {e} shop open?", "At what time does the {e} shop open?"),
        "The {e} shop opens at {v}.",
        _clock,
    ),
    Relation(
        "shop",
        (
            "The {e} shop is closed on {v}.",
            "On {v} the {e} shop stays shut.",
            "Do not go to the {e} shop on a {v}.",
        ),
        ("When is the {e} shop closed?", "On which day is the {e} shop closed?"),
        "The {e} shop is closed on {v}.",
        lambda r: r.choice(DAYS),
    ),
    Relation(
        "shop",
        (
            "The {e} shop sells {v}s for a good price.",
            "In the {e} shop you will find a nice {v}.",
            "At the {e} shop I bought a {v}.",
        ),
        ("What does the {e} shop sell?", "What can I buy in the {e} shop?"),
        "The {e} shop sells a {v}.",
        lambda r: r.choice(ITEMS),
    ),
    Relation(
        "shop",
        (
            "The {e} shop is in {v}.",
            "You will find the {e} shop in {v}.",
            "The way to the {e} shop leads through {v}.",
        ),
        ("Where is the {e} shop?", "In which city is the {e} shop?"),
        "The {e} shop is in {v}.",
        _city,
    ),
)
ENTITIES = 48  # a letter or a guide names a few dozen people and things, however long it is
FORMS = (  # how a document opens, and what stands between its paragraphs
    ("Dear friend,\nthank you for your letter. Here is the news from us.\n\n", "\n\n"),
    ("Meeting notes\n\n", "\n- "),
    ("# Town guide\n\n", "\n\n"),
    ("From: office\nTo: all\nSubject: news\n\n", "\n\n"),
    ("Diary\n\n", "\n"),
    ("", "\n\n"),
)


def facts(
    rng: Random, pieces: int, questions: int, depth: float | None, density: float | None = None
) -> Draft:
    """Sentences that state facts of several entities, at most ENTITIES unless more are asked about,
    among sentences that state none; questions in words of their own.
    """
    head, between = rng.choice(FORMS)
    density = rng.uniform(0.3, 0.9) if density is None else density
    per_entity = rng.uniform(1.0, 4.0)
    count = min(round(pieces * density), round(ENTITIES * per_entity))
    count = min(max(questions, 2, count), pieces)
    entities = people(rng, max(2, round(count / per_entity)))
    kinds = {name: rng.choice(("person", "person", "project", "shop")) for name in entities}
    made, seen = [], set()
    while len(made) < count:
        name = rng.choice(entities)
        relation = rng.randrange(len(RELATIONS))
        if RELATIONS[relation].kind != kinds[name]:
            continue
        if (name, relation) in seen:  # all said of this one: somebody new comes in
            name = people(rng, 1, entities)[0]
            entities.append(name)
            kinds[name] = RELATIONS[relation].kind
        seen.add((name, relation))
        made.append((name, RELATIONS[relation], RELATIONS[relation].value(rng)))
    draft = Draft(head=head, pieces=[filler(rng) for _ in range(pieces)])
    places = slots(rng, pieces, count, depth)
    for place, (name, relation, value) in zip(places, made, strict=True):
        text = rng.choice(relation.said).format(e=name, v=value)
        draft.pieces[place] = text[0].upper() + text[1:]
    draft.pieces = [text + (between if rng.random() < 0.25 else " ") for text in draft.pieces]
    draft.foot = "\n"
    for place, (name, relation, value) in list(zip(places, made, strict=True))[:questions]:
        draft.ask(
            rng.choice(relation.asked).format(e=name),
            relation.answer.format(e=name, v=value),
            value,
            [place],
        )
    return draft


TASKS = [
    Task(
        "facts",
        "facts stated in sentences in several phrasings, in letters, notes and guides",
        facts,
        4,
    )
]
