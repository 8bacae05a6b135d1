"""Try every variant and write docs/MODELS.md.

`--check` writes nothing and exits 1 where the page is stale. Needs transformers
(requirements-dev.txt), which makes the checkpoints and renders the templates.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.base.errors import UsageError
from engine.model.config.config import ModelConfig
from tools.common.arguments import command
from tools.common.program import guarded, replace_text, say
from tools.families.models import VARIANTS, make
from tools.families.page import page
from tools.families.probes import Attempt, attempts, chat

PAGE = Path(__file__).resolve().parents[2] / "docs/MODELS.md"


def tried(variants: Iterable[str]) -> dict[str, list[Attempt]]:
    """{variant: what was tried on a checkpoint of it}."""
    found = {}
    for name in variants:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as work:
            make(Path(folder), name)
            config = ModelConfig.from_folder(folder)
            found[name] = [chat(config.family), *attempts(Path(folder), config, Path(work))]
            say(f"{name}: {sum(not one.why for one in found[name])} of {len(found[name])} work")
    return found


def run(check: bool) -> int:
    """Write the page, or say whether it is current; the exit code."""
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("families: needs transformers: pip install -r requirements-dev.txt")
    text = page(tried(VARIANTS))
    if check:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE}: {'current' if current else 'stale: run python -m tools.families'}")
        return 0 if current else 1
    print(f"wrote {replace_text(PAGE, text)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (stale, or the run failed), 2 (usage) or 130 (Ctrl-C)."""
    parser = command("python -m tools.families", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it is stale")
    options = parser.parse_args(argv)
    return guarded(lambda: run(options.check))
