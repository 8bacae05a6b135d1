"""Who holds which beginning: against a plain list of all that was handed out.

Stops: a beginning found that nobody got, a request that follows a beginning shared by everybody,
a replica named that is gone, counts that drift, a memory without bound, bodies that are no JSON.
"""

import json
import random

import pytest

from engine.fleet.prefixes import BLOCK, Prefixes, beginnings


def body(text, question="", **more):
    content = f"{text}{question}"
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **more})


@pytest.mark.parametrize("length", [0, 1, BLOCK - 60, BLOCK, BLOCK + 1, 3 * BLOCK, 7 * BLOCK + 13])
def test_two_questions_share_the_beginnings_of_their_document(length):
    draw = random.Random(length)
    text = "".join(draw.choices("abc \u00e4\u20ac", k=length))
    one, two = (beginnings(body(text, q).encode()) for q in ("Who?", " And where, then?"))
    alone = len(json.dumps({"messages": [{"role": "user", "content": text}]})) - len('"}]}')
    assert one[: alone // BLOCK] == two[: alone // BLOCK] and len(one) >= alone // BLOCK
    other = beginnings(body("x" + text, "Who?").encode())
    assert not set(one) & set(other)  # a beginning is all that stands before its end
    assert beginnings(body(text, "Who?", temperature=1, stream=True).encode()) == one


def test_everything_that_a_template_writes_counts():
    text = "t" * 2 * BLOCK
    forms = [
        {"prompt": text},
        {"input": text},
        {"messages": [{"role": "user", "content": text}]},
        {"messages": [{"role": "system", "content": text}]},
        {"system": "s", "messages": [{"role": "user", "content": text}]},
        {"tools": [{"name": "t"}], "messages": [{"role": "user", "content": text}]},
    ]
    found = [beginnings(json.dumps(form).encode()) for form in forms]
    assert all(found) and len({one[0] for one in found}) == len(forms)


@pytest.mark.parametrize("bad", [b"", b"[1]", b"\xff\xfe", b'{"a":', b"7", b"[" * 100_000])
def test_what_is_no_request_has_no_beginnings(bad):
    assert beginnings(bad) == ()


@pytest.mark.parametrize("seed", range(6))
def test_the_holder_is_who_got_the_longest_beginning(seed):
    """1,000 random requests over a tree of texts, replicas coming and going."""
    draw = random.Random(seed)
    prefixes, given = Prefixes(most=10**6, share=0.5), {}
    replicas = [f"r{n}" for n in range(4)]
    for step in range(1000):
        chain, name = [], b""
        for _ in range(draw.randrange(8)):
            name += draw.choice([b"a", b"b"])
            chain.append(name)
        alive = draw.sample(replicas, draw.randrange(1, 5))
        longest = max((n for n in range(1, len(chain) + 1) if given.get(chain[n - 1]) in alive),
                      default=0)  # fmt: skip
        expected = given[chain[longest - 1]] if longest and 2 * longest >= len(chain) else None
        assert prefixes.holder(chain, alive) == expected
        who = draw.choice(replicas)
        prefixes.note(chain, who)
        given.update(dict.fromkeys(chain, who))
        if step % 50 == 49:
            prefixes.drop(who)
            given = {one: other for one, other in given.items() if other != who}
        for one in replicas:
            assert prefixes.held(one) == sum(holder == one for holder in given.values())


def test_the_oldest_beginnings_are_forgotten():
    prefixes = Prefixes(most=10)
    for number in range(100):
        prefixes.note([b"%d" % number], "a" if number % 2 else "b")
    assert prefixes.held("a") + prefixes.held("b") == 10
    assert prefixes.holder([b"89"], ["a"]) is None and prefixes.holder([b"91"], ["a"]) == "a"
    prefixes.note([b"91"], "a")  # asked for again: the newest
    for number in range(9):
        prefixes.note([b"n%d" % number], "b")
    assert prefixes.holder([b"91"], ["a"]) == "a"


def test_a_beginning_that_all_share_does_not_draw_all_to_one_replica():
    prefixes = Prefixes(share=0.5)
    shared, own = [b"s"], [b"s1", b"s2", b"s3"]
    prefixes.note([*shared, *own], "a")
    assert prefixes.holder([b"s", b"t1", b"t2"], ["a", "b"]) is None
    assert prefixes.holder([b"s", b"s1", b"u"], ["a", "b"]) == "a"
    assert prefixes.holder([b"s", b"t1"], ["a", "b"]) == "a"  # half of it is worth it
    assert prefixes.holder([], ["a"]) is None
