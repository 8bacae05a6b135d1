"""What the chat says where there is nothing to show or to compare: in its own words, with a command
that helps, and without a ranking that is none.
"""

import io

import pytest

from engine.chat.cli import main
from tests.builders import POCKET, ROOT

ASKED = "What is the pass key of Alice?"


@pytest.fixture
def said(monkeypatch, capsys):
    """Standard error of the shipped model's chat over these lines."""

    def run(*lines, flags=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["--threads", "1", "-n", "12", *flags]) == 0
        return capsys.readouterr().err

    return run


def test_below_the_crossover_the_chat_says_from_where_on_a_method_is_sparse(said):
    err = said("/method omnikv tokens=2048", ASKED, "/check", "/sources")
    assert "nothing is read again; full attention until then: sparse from " in err
    told = "tokens on; this context has 1,6"
    assert err.count(told) == 2 and "tokens on; this context has 1,586" in err
    assert "nothing to compare: " in err and "checking" not in err
    assert err.count("/method omnikv dense_below=0") == 2 and "--" not in err.split("nothing to")[1]


def test_the_setting_that_it_names_works(said):
    err = said("/method omnikv dense_below=0 tokens=64", ASKED, "/check 4", "/sources 1")
    assert "checked 4 steps" in err and "welcome.txt, line 61" in err and "sparse from" not in err


@pytest.mark.parametrize("name", ["full", "h2o"])
def test_check_under_a_method_that_chooses_nothing_is_in_the_chats_words(said, name):
    err = said(f"/method {name}", ASKED, "/check", "/sources")
    assert "nothing to compare: " in err and "method=OmniKV(" not in err and "checking" not in err
    assert "/method omnikv dense_below=0" in err and "--dense-below" not in err
    assert ("the last answer ran full attention" in err) == (name == "full")
    assert ("the last answer chose no passage (h2o drops tokens" in err) == (name == "h2o")


def test_what_shares_logits_is_not_called_full_attention_and_freed_keys_are_not_compared(said):
    """PoD, whose keys of distant tokens are gone in some heads."""
    blocks = str(((0, 2, 4, 6),) * 2).replace(" ", "")
    err = said(f"/method pod_untrained blocks={blocks} recent=256", ASKED, "/sources", "/check 4")
    assert "the last answer chose no passage (pod_untrained ranks none; /method omnikv" in err
    told = "nothing to compare: pod_untrained has freed rows that full attention would read; "
    assert told + "/method pod_untrained forget=False keeps them" in err and "error" not in err


def test_what_a_method_cannot_do_is_said_with_a_command_of_the_chat(said, tmp_path):
    assert "(/method full in the chat, " in said(
        "/method h2o forget=False", f"/save {tmp_path / 'a'}"
    )


def test_a_change_says_what_going_on_with_another_method_will_cost(said):
    """Before the rows go, and again before they are read; not where they stay."""
    freed = "snapkv frees the rows that it does not keep of"
    err = said("/method snapkv", "/method full")
    first, again = err.index(freed), err.index("snapkv has freed rows that full needs")
    assert err.index("another method will read them again") < err.index("SnapKV(") < again
    assert first < again and "forget=False keeps them" in err
    err = said("/method snapkv forget=False", "/method full")
    assert freed not in err and "are read again" not in err


def test_pages_that_tie_are_not_ranked(said, tmp_path):
    path = tmp_path / "read.html"
    err = said("/method quest", ASKED, "/sources", f"/sources {path}")
    assert "quest: its budget covers all 1,605 tokens of this context" in err and "% of" not in err
    assert "read all its passages equally, so that the page shows none" in err
    assert '"totals": [0.0, 0.0' in path.read_text()


@pytest.mark.parametrize(
    ("name", "more", "times"), [("quest", "", 2), ("omnikv", " dense_below=0", 1)]
)
def test_a_budget_that_leaves_nothing_out_is_said_with_a_command_that_chooses(
    said, name, more, times
):
    """Not "does not rank", and no comparison of full attention with itself; OmniKV ranks still."""
    told = "its budget covers all 1,605 tokens of this context, and leaves none out"
    word = f"/method {name} tokens=200{more}"
    lines = [f"/method {name} tokens=2048{more}", ASKED, "/sources", "/check 2", word, ASKED]
    err = said(*lines, "/sources", "/check 2")
    assert err.count(told) == err.count(f"{word} chooses") == times and "does not rank" not in err
    assert err.count("checked 2 steps") == 1
    assert err.count("% of all that are shown") == 3 - times


@pytest.mark.parametrize(("name", "does"), [("quest", "chooses"), ("snapkv", "drops")])
def test_a_budget_above_the_context_is_said_once_before_anything_is_read(name, does, capsys):
    given = ["--method", name, "--ctx", "4096", "--plan", "--tokens"]
    told = f"{name} {does} nothing: its budget covers the whole context of 4,096 tokens; give it"
    assert main([*given, "8000"]) == 0 and capsys.readouterr().out.count(told) == 1
    assert main([*given, "4095"]) == 0 and told not in capsys.readouterr().out


def test_drafts_that_were_looked_up_are_said_to_be(said):
    flags = ["--model", str(POCKET), "-i", "-f", str(POCKET / "hint.txt"), "--dense-below", "0"]
    flags += ["--tokens", "32", "--tail", "64"]
    err = said("/method exact draft=3", "Hello", "/sources", flags=flags)
    assert "drafts were copied from where the same words stood before" in err
    assert "/method exact lookup=False" in err and "--draft" not in err


def test_a_file_that_is_no_session_is_not_to_be_deleted(said):
    for name in ("README.md", "weights/pocket/model.safetensors", "Makefile"):
        err = said(f"/load {ROOT / name}")
        assert "found no saved session, expected a file that /save wrote" in err
        assert "delete" not in err
