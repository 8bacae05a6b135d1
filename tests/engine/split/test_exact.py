"""Exact mode over several devices: full attention's text, with one device's drafts, acceptances and
rows. In a step in which no layer chooses, layers read lists of other parts, of later ones too.
"""

import pytest

from engine import LLM, Full, OmniKV, SamplingParams
from engine.base.errors import SettingError
from engine.methods.exact import Exact
from engine.methods.select.quest import Quest
from engine.methods.select.tidaldecode import TidalDecode
from engine.plan.layers import layer_plan, single_layer_groups
from engine.plan.split.cut import part_plan
from tests.engine.ranks.model import ids_of, model_folder
from tests.engine.split.test_sessions import SPARSE, one_of, several

DRAFTERS = {
    "omnikv": OmniKV(**{**SPARSE, "tokens": 6}),
    "window": OmniKV(**{**SPARSE, "tokens": 6}, selector="exponential", window=8),
    "wait": OmniKV(**SPARSE, wait_layers=1),
    "quest": Quest(tokens=32),
    "tidaldecode": TidalDecode(tokens=8, select_layer=1, correction_layer=4, gqa_reduce="max"),
}
# parts before the first filter layer, after the last one, and between
GIVEN = [
    ("omnikv", (1, 6)),
    ("omnikv", (2, 1, 2, 2)),
    ("window", (2, 1, 2, 2)),
    ("wait", (1, 6)),
    ("quest", (1, 6)),
    ("tidaldecode", (1, 1, 1, 4)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder: 7 layers."""
    return model_folder(tmp_path_factory.mktemp("split") / "model", head_dim=32)


def written(llm, **opened):
    """Tokens of greedy and of seeded answers, and what was drafted and read for them."""
    found, counted = [], []
    for temperature in (0.0, 0.9):
        params = SamplingParams(max_tokens=14, temperature=temperature, seed=4, ignore_eos=True)
        with llm.session(**opened) as session:
            found.append([out.token_id for out in session.generate(ids_of(150), params)])
            session.truncate(140)
            more = session.generate(ids_of(30, seed=2), params)
            found.append([out.token_id for out in more])
            counters = session.counters
            counted.append((counters.cycles, counters.drafted, counters.accepted))
    return found, counted


@pytest.mark.parametrize("name, split", GIVEN)
def test_drafts_and_text_are_one_device_s(folder, name, split):
    method = Exact(DRAFTERS[name], draft=3, lookup=False)
    one = one_of(folder, method=method)
    llm = several(folder, ("cpu",) * len(split), split=split, method=method)
    want = written(one)
    assert written(llm) == want and want[1][0][1] > 10
    assert want[0] == written(one_of(folder, method=Full()))[0]
    if (name, len(split)) in (("omnikv", 4), ("quest", 2)):
        assert written(llm, offload="host") == written(one, offload="host")


def test_parts_know_the_lists_of_steps_in_which_nobody_chooses():
    for plan in (layer_plan(9, (2, 6)), layer_plan(9, (2, 5), 1), single_layer_groups(9, (3, 7))):
        whole = type(plan)(*plan_fields(plan), whole=True)
        for first in range(9):
            for stop in range(first + 1, 10):
                part = part_plan(whole, first, stop)
                for layer in range(first, stop):
                    own = part.number_of(part.kept_group(layer - first))
                    assert own == whole.kept_group(layer)


def plan_fields(plan):
    """What a layer plan begins with."""
    return plan.roles, plan.groups, plan.group_of


def test_verifications_that_choose_are_refused(folder):
    method = Exact(DRAFTERS["omnikv"], chooser="verifier")
    with pytest.raises(SettingError, match="has verifications choose, whose lists do not cross"):
        LLM(folder, devices=("cpu", "cpu"), load=False, method=method)


def test_drafts_of_the_first_layers_are_refused(folder):
    with pytest.raises(SettingError, match="several devices, but it drafts by the first layers"):
        LLM(folder, devices=("cpu", "cpu"), load=False, method=Exact(Full(), early_exit=3))
