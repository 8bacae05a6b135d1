"""docs/MODELS.md: what each family does, as tried, and what is known of each.

The letter of a note is fixed by what the engine's sentence contains, so that a page made of a few
variants says the same as the whole one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from engine.base.errors import EngineError
from engine.base.figures import count
from engine.model.config.config import ModelConfig
from tools.common.page import table
from tools.families.facts import Facts, known
from tools.families.models import SMALL
from tools.families.probes import Attempt
from tools.repo.api_page import prose, wrapped_item

HEAD = """
# Models

Written by `python -m tools.families`; do not edit it by hand.

The engine runs Llama and the families below it in this page: plain attention in all layers, sliding
windows or a recurrent form in some of them, mixtures of experts. The first table says what works
with each. What a family does differently from Llama is a few constants of its configuration
(engine/model/config/block.py), read by one file each in engine/model/config/families/. How
fast each is: docs/PERFORMANCE.md.
"""
TRIED = """
## What each family does here

Each cell was tried on a small random checkpoint, in float32 on a CPU. The chat template is one in
the family's form, and its text is transformers'. The other columns read a text of 330 tokens, more
than any of the windows, and take 3 decode steps. "works" means:

- plan: the planned bank has the bytes of a session's.
- calibrate: filter layers are chosen.
- offload, exact prefill, OmniKV-prefill: the logits equal full attention's within 0.002 with the
  bank in host memory, in chunks of 7 and as one chunk, and with a sparse prefill whose budget holds
  the text.
- full, omnikv, exact, other methods: the same for each method at a budget that holds the text;
  omnikv and exact also run with a budget of 20 tokens.
- sessions on disk: a restored session's next logits are the same to the bit. Models with sliding
  windows are saved like others, but `--cache` keeps no blocks of them: the windows forget rows.

tests/engine/model/test_families.py holds the logits of full attention to those of transformers, for
the same variants.
"""
COLUMNS = (
    "chat template",
    "plan",
    "calibrate --by loss",
    "calibrate --by reads",
    "offload",
    "exact prefill",
    "OmniKV-prefill",
    "sessions on disk",
    "full",
    "omnikv",
    "exact",
)
# what a sentence contains -> its letter
NOTES = {
    "does not know the sliding-window layers": "a",
    "turns rows back by one rope": "b",
    "a sliding-window layer, expected layers that": "c",
    "found layers with different ropes": "d",
    "every layer of this model slides": "e",
    "leave nothing to choose": "f",
    "use --by loss": "g",
    "does not know the cap on attention scores": "h",
    "does not know the attention sinks": "i",
    "does not know the recurrent layers": "k",
    "a recurrent layer, expected layers that": "l",
    "does not know the latent attention": "m",
}
REFUSED: tuple[tuple[str, dict[str, object]], ...] = (
    ("Gemma 3 with vision (4B and more)", dict(architectures=["Gemma3ForConditionalGeneration"])),
    ("GLM-4", dict(architectures=["Glm4ForCausalLM"])),
    ("Llama 4", dict(architectures=["Llama4ForConditionalGeneration"])),
    ("MXFP4 in a family other than gpt-oss", dict(quantization_config={"quant_method": "mxfp4"})),
)
REFUSED_HEAD = """
## Refused by name

The engine's own sentences:
"""


def page(results: Mapping[str, Sequence[Attempt]]) -> str:
    """The whole page from {variant: its attempts}."""
    facts, common = known()
    families = {name: fact for fact in facts for name in fact.variants}
    rows = [row(name, families[name].family.name, found) for name, found in results.items()]
    shown = ", ".join(f"`{name}`" for name in sorted(common))
    blocks = [
        *(HEAD.strip(), TRIED.strip()),
        "\n".join(table(["variant", "family", *COLUMNS, "other methods"], rows)),
        *notes(results),
        "## The families",
        prose(f"Every family reads {shown}."),
        *(block for fact in facts for block in section(fact)),
        REFUSED_HEAD.strip(),
        *refusals(),
    ]
    return "\n\n".join(blocks) + "\n"


def row(name: str, family: str, found: Sequence[Attempt]) -> list[str]:
    """One variant's line of the table."""
    by_name = {attempt.name: attempt.why for attempt in found}
    cells = [_cell([by_name[column]]) for column in COLUMNS]
    others = [attempt.why for attempt in found if attempt.name not in COLUMNS]
    works = sum(not why for why in others)
    last = f"{works} of {len(others)} work"
    if works < len(others):
        last += " " + _letters(others)
    return [f"`{name}`", family, *cells, last]


def _cell(why: Sequence[str]) -> str:
    return _letters(why) if any(why) else "works"


def _letters(why: Sequence[str]) -> str:
    return "".join(f"({letter})" for letter in sorted({letter_of(text) for text in why if text}))


def letter_of(why: str) -> str:
    """The note that an engine's sentence belongs to."""
    for part, letter in NOTES.items():
        if part in why:
            return letter
    raise AssertionError(f"no note for {why!r}: add one to NOTES in tools/families/page.py")


def notes(results: Mapping[str, Sequence[Attempt]]) -> Iterator[str]:
    """The sentences behind the letters, each with who said it."""
    said: dict[str, tuple[str, dict[str, None]]] = {}
    for found in results.values():
        for attempt in found:
            if attempt.why:
                sentence = attempt.why.removeprefix(f"{attempt.name}: ")
                sentence = re.sub(
                    r"\((Mistral|Qwen[23][-.\w]*|MiniMax-M2|SmolLM3|Phi-3|Gemma [234]|gpt-oss|"
                    r"DeepSeek-V[23]|GLM-4\.7-Flash|MiniCPM3|Mistral 4)\)",
                    "(...)",
                    sentence,
                )
                said.setdefault(letter_of(attempt.why), (sentence, {}))[1][attempt.name] = None
    for letter, (sentence, names) in sorted(said.items()):
        listed = ", ".join(f"`{name}`" for name in sorted(names))
        yield prose(f"({letter}) {listed}: {sentence}")


def section(fact: Facts) -> Iterator[str]:
    """A family's part of the page."""
    yield f"### {fact.family.name}"
    names = ", ".join(f"`{name}`" for name in fact.family.architectures)
    yield prose(f"{fact.file}, {fact.lines} lines. Architectures: {names}.")
    for paragraph in fact.about.split("\n\n"):
        yield prose(paragraph)
    lines = [
        f"Fields beside the common ones: {_code(sorted(fact.fields)) or 'none'}.",
        f"Differs from Llama's block in: {_code(fact.differs) or 'nothing'}.",
        f"Tensors of a layer that Llama has not (+), or only Llama has (-): "
        f"{_code(fact.tensors) or 'none'}.",
        f"Variants tried: {_code(list(fact.variants))}.",
    ]
    yield "\n".join(_item(line) for line in lines)
    if fact.aliases:
        rows = []
        for name, alias in fact.aliases.items():
            filters = ",".join(map(str, alias.filter_layers or ())) or "none"
            size = f"{alias.params / 1e9:.2f}B, {alias.bytes_bf16 / 1e9:.1f} GB"
            rows.append(
                (f"`{name}`", alias.hub_id, count(alias.context), size, filters, alias.note)
            )
        columns = (
            "alias | hub id | context | weights, bfloat16 | filter layers, as published | note"
        )
        yield "\n".join(table(columns, rows))


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _item(line: str) -> str:
    return wrapped_item("- " + line)


def refusals() -> Iterator[str]:
    """Return the parser's errors for well-known models that are not supported."""
    sizes = dict(SMALL, architectures=["LlamaForCausalLM"], hidden_activation="gelu_pytorch_tanh")
    lines = []
    for name, changes in REFUSED:
        try:
            ModelConfig.from_dict(sizes | changes, "config.json")
        except EngineError as error:
            lines.append(_item(f"{name}: {error}"))
        else:
            raise AssertionError(f"{name} is not refused")
    yield "\n".join(lines)
