"""Resolve a model's name to a folder or a GGUF file: what is on the disk wins, then the hub cache,
then the hub.

huggingface_hub itself reads HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN. It is
imported only if a name is no folder. A complete copy in the cache never causes a network call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from weights.aliases import ALIASES, Alias, suggest
from weights.errors import BadCheckpoint, HubError, ModelNotFound, UnsupportedCheckpoint
from weights.gguf.magic import is_gguf
from weights.jsonfile import INDEX_LIMIT, read_json, shown
from weights.shapes import config_of

# Files to fetch, and no others: repositories carry the same weights again as pickles, "original/"
# and "consolidated".
PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "omnikv.json",
]
CONFIG_PATTERNS = ["config.json", "generation_config.json", "omnikv.json"]
SHIPPED = Path(__file__).parent / "pocket"  # the model that comes with the engine
JUDGE = Path(__file__).parent / "judge"  # another, to compare methods on
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class Resolved:
    """Where a model is.

    folder: of the model, or a GGUF file. source: how it was found, "folder", "file", "cache",
    "hub", or "table" (not at all: the alias table's sizes are enough for a plan, and why_not says
    what kept it from being fetched); name: as the caller gave it; hub_id, revision (commit) and
    alias (the table's entry): None if they do not apply.
    """

    folder: Path
    source: str
    name: str
    hub_id: str | None = None
    revision: str | None = None
    alias: Alias | None = None
    why_not: str = ""

    @property
    def sizes(self) -> dict[str, Any] | None:
        """What a plan needs of config.json, from the alias table; None where there is a file."""
        return config_of(self.alias) if self.alias and self.source == "table" else None

    def require_fetched(self) -> None:
        """Raise the HubError that left only the alias table's sizes."""
        if self.source == "table":
            raise HubError(self.why_not)

    def rope(self, asked: str | None) -> tuple[str | None, int]:
        """Return the rope to run with and the positions that it is meant to reach (0: its own):
        what was asked for, else the alias's preset.
        """
        if asked is not None or self.alias is None or self.alias.rope is None:
            return asked, 0
        return self.alias.rope, self.alias.context


def shipped(folder: Path | None = None) -> Path:
    """Return this folder, by default the shipped model's. Raises ModelNotFound without weights."""
    folder = folder or SHIPPED
    if not (folder / "model.safetensors").is_file():
        raise ModelNotFound(
            "no model is shipped with this engine: name a folder, an alias or a hub id "
            "(--list-models prints the aliases)"
        )
    return folder


def resolve(
    name: str | Path, progress: Callable[[str], None] | None = None, config_only: bool = False
) -> Resolved:
    """Resolve a folder, a GGUF file, "pocket" or "judge" (the shipped models), an alias or a hub id
    to what holds the model; download what is missing (resumable, with progress bars).

    config_only: for a plan, a snapshot with config.json is enough and no weights are fetched; an
    alias whose config.json cannot be had either has the alias table's sizes. progress: called with
    one line before a download starts. Raises ModelNotFound for an unknown name (and suggests near
    ones), HubError (gated, offline, unreachable, partial), and UnsupportedCheckpoint for a
    repository without safetensors.
    """
    name = str(name)
    try:
        path = Path(name).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError):  # too long for a path, a NUL in it, no home
        is_folder = exists = False
    if is_folder and name:  # an empty name is the current folder to pathlib
        return Resolved(path, "folder", name)
    for folder in (SHIPPED, JUDGE):
        if name.lower() == folder.name:
            return Resolved(shipped(folder), "folder", name)
        if name.lower().removeprefix("./").rstrip("/") == f"weights/{folder.name}":
            raise ModelNotFound(
                f"model {shown(name)}: no such folder here; the model shipped with the engine is "
                f'LLM("{folder.name}") (--model {folder.name}) from any folder'
            )
    alias = ALIASES.get(name.lower())
    hub_id = alias.hub_id if alias else name
    if exists and name and is_gguf(path):
        return Resolved(path, "file", name)
    if exists and name and not alias:
        raise ModelNotFound(
            f"model {shown(name, 200)}: found a file, expected a folder, a GGUF file, an alias or "
            "a hub id"
        )
    if not alias and (
        not _HUB_ID.fullmatch(name)
        or ".." in name
        or "--" in name
        or name.endswith((".git", ".", "-"))
    ):
        raise ModelNotFound(
            f"model {shown(name, 200)}: no such folder, alias or hub id (ORG/NAME){_near(name)}"
        )
    try:
        return _fetched(name, hub_id, alias, progress, config_only)
    except HubError as error:  # offline, gated, unreachable
        if alias is None or not config_only:
            raise
        return Resolved(Path(hub_id), "table", name, hub_id, None, alias, str(error))


def _fetched(
    name: str,
    hub_id: str,
    alias: Alias | None,
    progress: Callable[[str], None] | None,
    config_only: bool,
) -> Resolved:
    """As `resolve`, of a hub id: from the cache, else from the hub."""
    hub = _hub()
    folder = _cached(hub, hub_id)
    if folder and ((folder / "config.json").is_file() if config_only else not _missing(folder)):
        return Resolved(folder, "cache", name, hub_id, _revision(folder), alias)
    if hub.constants.HF_HUB_OFFLINE:
        raise _offline(hub, hub_id, folder)
    if progress and not (alias and config_only):  # the table's sizes do as well
        begun = "resuming" if folder and not config_only else "fetching"
        where = f"{hub_id} into {hub.constants.HF_HUB_CACHE}"
        progress(f"{begun} {f'config.json of {hub_id}' if config_only else where}")
    folder = _download(hub, hub_id, name, CONFIG_PATTERNS if config_only else PATTERNS)
    missing = _missing(folder)
    if missing and not (config_only and missing != "config.json"):
        raise _not_ours(folder, hub_id, missing)
    return Resolved(folder, "hub", name, hub_id, _revision(folder), alias)


def _hub() -> ModuleType:
    """Import huggingface_hub late: it takes half a second, and a local folder does not need it."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise HubError(
            f"huggingface_hub cannot be imported ({error}): install it, or name a folder"
        ) from error
    return huggingface_hub


def _cached(hub: ModuleType, hub_id: str) -> Path | None:
    """Find the newest snapshot in the cache, complete or not, without the network."""
    try:
        return Path(hub.snapshot_download(hub_id, allow_patterns=PATTERNS, local_files_only=True))
    except hub.errors.LocalEntryNotFoundError as error:
        # newer versions raise for partial snapshots too, and say where
        partial = getattr(error, "snapshot_path", None)
        return Path(partial) if partial else None
    except OSError as error:
        raise HubError(
            f"the cache {hub.constants.HF_HUB_CACHE} cannot be read: {_cause(error)}; see HF_HOME"
        ) from error
    except hub.errors.HFValidationError as error:
        raise ModelNotFound(
            f"model {shown(hub_id)}: not a valid hub id: {shown(str(error), 120)}"
        ) from None


def _missing(folder: Path) -> str | None:
    """Name the first file that a snapshot lacks, None if it is complete; reads names and the index
    only.
    """
    if not (folder / "config.json").is_file():
        return "config.json"
    if (folder / "model.safetensors").is_file():
        return None
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return "model.safetensors"
    try:
        shards = sorted(set(read_json(index, INDEX_LIMIT)["weight_map"].values()))
        return next((shard for shard in shards if not (folder / shard).is_file()), None)
    except (OSError, BadCheckpoint, KeyError, TypeError, AttributeError):
        # counts as complete: weights.checkpoint reports what is wrong with the index
        return None


def _offline(hub: ModuleType, hub_id: str, folder: Path | None) -> HubError:
    """Make the error for offline mode without a usable copy in the cache."""
    cache = hub.constants.HF_HUB_CACHE
    if folder:
        return HubError(
            f"{hub_id}: partial download in {folder}: {_missing(folder)} is missing, "
            f"and HF_HUB_OFFLINE is set; run once without it to resume"
        )
    return HubError(
        f"{hub_id}: not in the cache {cache}, and HF_HUB_OFFLINE is set; "
        f"run once without it, or name a folder"
    )


def _download(hub: ModuleType, hub_id: str, name: str, patterns: list[str]) -> Path:
    """Fetch what is missing; turn every refusal of the hub into one line with a remedy."""
    errors, page = hub.errors, f"{hub.constants.ENDPOINT}/{hub_id}"
    try:
        return Path(hub.snapshot_download(hub_id, allow_patterns=patterns))
    except errors.GatedRepoError as error:  # before RepositoryNotFoundError, which it derives from
        raise HubError(
            f"{hub_id}: gated: accept its licence at {page}, then set HF_TOKEN (hf auth login)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"model {shown(name, 200)}: the hub has no {hub_id}, "
            f"or it is private and HF_TOKEN may not read it{_near(name)}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise HubError(
            f"{hub_id}: not or not wholly in the cache, and the hub cannot be reached: "
            f"{_cause(error)}; check the connection and run again"
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        remedy = "check HF_TOKEN" if status in (401, 403) else "run again to resume"
        raise HubError(
            f"{hub_id}: the hub answered {status or 'with an error'}: {_cause(error)}; {remedy}"
        ) from error
    except Exception as error:  # whatever the transport raises (requests, httpx, xet, a full disk)
        raise HubError(
            f"{hub_id}: download failed: {_cause(error)}; run again to resume"
        ) from error


def _cause(error: BaseException) -> str:
    """Show the innermost cause on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return shown(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__, 160)


def _not_ours(folder: Path, hub_id: str, missing: str) -> Exception:
    """Make the error for a repository that is fetched whole and still lacks `missing`."""
    if (folder / "model.safetensors.index.json").is_file():
        return HubError(
            f"{hub_id}: the hub's index names {shown(missing)}, which the repository does not hold"
        )
    return UnsupportedCheckpoint(
        f"{hub_id}: found no {missing} on the hub, expected Hugging Face layout with safetensors "
        f"(pickle or GGUF only?)"
    )


def _near(name: str) -> str:
    near = suggest(name)
    return f"; did you mean {' or '.join(near)}?" if near else "; --list-models shows the aliases"


def _revision(folder: Path) -> str | None:
    return folder.name if folder.parent.name == "snapshots" else None
