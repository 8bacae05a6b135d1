"""What the shipped model says when it is asked something outside its skills, and questions of that
kind for training and tests.
"""

from random import Random

from tools.tasks.words import ADJECTIVES, CITIES, FOODS, ITEMS, NAMES, NOUNS, VERBS

REFUSAL = "I can only look up what the document says."
GREETING = "Hello! Ask me about the document."

_OUTSIDE = (
    "Write a poem about {n}.",
    "Write a story about a {a} {n}.",
    "Tell me a joke.",
    "Tell me a joke about a {n}.",
    "Who are you?",
    "How are you?",
    "What is the weather in {c} today?",
    "Who won the {n} cup in 1998?",
    "Translate {n} to French.",
    "Translate this document to German.",
    "How do I cook {f}?",
    "Give me a recipe for {f}.",
    "What do you think about {n}?",
    "Why is the {n} {a}?",
    "Explain how a {i} works.",
    "Write a program that sorts numbers.",
    "Fix my code.",
    "What is the meaning of life?",
    "Can you draw a {n}?",
    "Sing a song about {n}.",
    "Who is the president?",
    "What is the capital of France?",
    "Should I buy a {i}?",
    "Do you like {f}?",
    "Are you a human?",
    "What will happen tomorrow?",
    "Is {p} a good person?",
    "Recommend a book about {n}.",
    "Summarize the document.",
    "Rewrite the text in a {a} style.",
    "How far is it from {c} to {d}?",
    "What is the best {i}?",
    "Help me with my homework.",
    "Give me advice.",
    "Let us play a game.",
    "What is 17 times 23?",
    "Solve this equation.",
    "Imagine you are a {n}.",
    "Why did {p} {v} the {n}?",
    "What rhymes with {n}?",
    "Compare a {i} and a {n}.",
    "How can I sleep better?",
    "Plan a trip to {c}.",
    "Write an email to {p}.",
    "Who wrote this text?",
)
_HELLO = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Hi there",
    "Hey",
    "Good morning",
    "Good evening!",
    "hello",
    "hi",
)


def outside(rng: Random) -> tuple[str, str]:
    """A question outside the model's skills and its fixed answer; one in five is a greeting."""
    if rng.random() < 0.2:
        return rng.choice(_HELLO), GREETING
    city = rng.sample(CITIES, 2)
    text = rng.choice(_OUTSIDE).format(
        n=rng.choice(NOUNS),
        a=rng.choice(ADJECTIVES),
        c=city[0],
        d=city[1],
        f=rng.choice(FOODS),
        i=rng.choice(ITEMS),
        p=rng.choice(NAMES),
        v=rng.choice(VERBS),
    )
    return (text if rng.random() < 0.8 else text[0].lower() + text[1:]), REFUSAL
