"""The table of prompts that choose, on the shipped model: dense loses nothing, one key most."""

from tools.studies import prompts


def test_prompts_that_choose_in_one_table(tmp_path, capsys):
    """Dense loses nothing, a row a method, the controls among them; one key loses more than a
    quarter of the tokens.
    """
    flags = ["--length", "300", "--texts", "2", "--scored", "8", "--block", "64"]
    assert (
        prompts.main(
            [*flags, "--shares", "0.25", "--thresholds", "0.5", "--out", str(tmp_path / "page.md")]
        )
        == 0
    )
    page = capsys.readouterr().out
    assert (tmp_path / "page.md").read_text() == page
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    found = {row[0]: row for row in rows[1:]}
    names = {"dense", "omnikv prefill r=1", "minference 25%", "quoka 25%"}
    names |= {"xattention 50% by 8", "xattention 50% by 16"}
    assert set(found) == names | {prompts.CHANCE, "quoka, one key"}
    assert found["dense"][1:] != found["quoka 25%"][1:]
    assert found["dense"][2:4] == ["1.00", "1.00"] and found["dense"][5].startswith("+0.000")
    kl = {name: float(row[6].split()[0]) for name, row in found.items()}
    assert kl["dense"] == 0 < kl["quoka 25%"] < kl["quoka, one key"]


def test_the_control_by_chance_ends_with_its_run():
    """Whoever measures after it has the rule again."""
    plain = prompts.quoka.cosines
    with prompts.drawn(prompts.CHANCE):
        assert prompts.quoka.cosines is not plain
    assert prompts.quoka.cosines is plain
    with prompts.drawn("quoka 25%"):
        assert prompts.quoka.cosines is plain
