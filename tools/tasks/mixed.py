"""Documents of several sections with questions about all of them, in any order: the multi-question
document.
"""

from random import Random

from tools.tasks import facts, lookup, many, reason
from tools.tasks.draft import Draft, Task
from tools.tasks.talk import outside

PARTS = {task.name: task for module in (lookup, reason, many, facts) for task in module.TASKS}
SECTIONS = ("passkey", "kv", "needle", "two_stage", "chains", "facts", "frequent")


def mixed(
    rng: Random, pieces: int, questions: int, depth: float | None, refuse: float = 0.0
) -> Draft:
    """Two or three sections of different skills, or one when the document is short; the questions
    go through all of them.
    """
    room = max(1, pieces // 12)
    names = rng.sample(sorted(set(SECTIONS)), min(3, room, max(1, questions), rng.randint(2, 3)))
    draft, asked = Draft(), []
    share, each = pieces // len(names), -(-questions // len(names))
    for name in names:
        task = PARTS[name]
        count = min(
            each,
            task.max_questions,
            max(1, (share - task.min_pieces) // max(1, task.per_question) + 1),
        )
        part = task.build(rng, max(share, task.needed(count)), count, depth if not asked else None)
        base = len(draft.pieces) + 1  # the section's head is a piece of its own
        draft.pieces += [part.head or "\n", *part.pieces, part.foot or "\n"]
        asked += [
            (q, a, x, [base + i for i in e])
            for q, a, x, e in zip(
                part.questions, part.answers, part.exact, part.evidence, strict=True
            )
        ]
    first, others = asked[0], asked[1:]
    rng.shuffle(others)
    for question in ([first] + others)[:questions]:
        draft.ask(*question)
    for index in range(len(draft.questions)):
        if rng.random() < refuse:
            question, answer = outside(rng)
            (
                draft.questions[index],
                draft.answers[index],
                draft.exact[index],
                draft.evidence[index],
            ) = (
                question,
                answer,
                answer,
                [],
            )
    return draft


TASKS = [
    Task(
        "mixed",
        "two or three sections of different skills, questions about all of them",
        mixed,
        24,
        12,
        40,
    )
]
