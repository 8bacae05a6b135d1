"""Names resolve to folders without a network, by a fake hub and a hand-made cache."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiny_model import INDEX, SINGLE, sound
from weights import resolve as module
from weights.aliases import ALIASES
from weights.errors import HubError, ModelNotFound, UnsupportedCheckpoint
from weights.resolve import PATTERNS, resolve

hub = pytest.importorskip("huggingface_hub")
import huggingface_hub.constants  # noqa: E402  (the package loads its parts lazily)
import huggingface_hub.errors  # noqa: E402, F401
import huggingface_hub.utils  # noqa: E402, F401

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail the test on any attempt to reach the hub, even if the library swallows the error."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("network used in a test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not tried, f"network used: {tried[0]}"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache of our own."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    return folder


def cached(cache, hub_id, shards=1, revision=REVISION):
    """Write a model into the cache as the hub's client does; return its snapshot folder."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    sound(snapshot, shards=shards)
    (repository / "blobs").mkdir(exist_ok=True)
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(repository / "blobs" / f"hash{i}")
        file.symlink_to(Path("..", "..", "blobs", f"hash{i}"))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    return snapshot


@pytest.fixture
def fake(monkeypatch):
    """A fake hub: fake.answer(hub_id) downloads or raises; fake.calls lists the online calls."""
    real, state = hub.snapshot_download, SimpleNamespace(calls=[], answer=None)

    def snapshot_download(hub_id, **options):
        if options.get("local_files_only"):
            return real(hub_id, **options)
        state.calls.append((hub_id, options))
        return str(state.answer(hub_id))

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    return state


def hub_error(name, message="", status=None, cause=None):
    """Make one of the hub's errors without its constructor, which differs between versions."""
    kind = getattr(hub.errors, name)
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.response = SimpleNamespace(status_code=status)
    error.__cause__ = cause
    return error


def raising(error):
    def answer(hub_id):
        raise error

    return answer


# ---------------------------------------------------------------- folders


@pytest.mark.parametrize("name", ["llama-3-8b-262k", "01-ai/Yi-9B-200K", "weird name!", "a/b/c"])
def test_a_local_folder_always_wins(cache, fake, name):
    """Over an alias, over a hub id, over the cache: no look at either."""
    cached(cache, "01-ai/Yi-9B-200K")
    sound(Path(name))
    for asked in (name, Path(name), f"./{name}", str(Path(name).resolve())):
        found = resolve(asked)
        assert (found.source, found.hub_id, found.revision, found.alias) == (
            "folder",
            None,
            None,
            None,
        )
        assert found.folder.resolve() == Path(name).resolve() and found.name == str(asked)
    assert not fake.calls


def test_home_is_expanded(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    sound(tmp_path / "models" / "mine")
    assert resolve("~/models/mine").folder == tmp_path / "models" / "mine"


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "nothing",
        "./nothing",
        "../x",
        "/no/such/folder",
        "a/b/c",
        "a//b",
        "/a",
        "a/",
        "x" * 5000,
        "nul\0byte",
        "~no-such-user/x",
        "a/../b",
        "a--b/c",
        "org/name.git",
        "org/-",
        "org/name\n",
        "\u00e9/x",
    ],
)
def test_names_that_are_nothing(cache, fake, name):
    """Refused by their form: the hub is not asked about a path that was mistyped."""
    with pytest.raises(ModelNotFound) as caught:
        resolve(name)
    line = str(caught.value)
    assert (
        "\n" not in line
        and "no such folder" in line
        and len(line) < 400
        and caught.value.exit_code == 2
    )
    assert not fake.calls


def test_a_file_is_no_folder(cache):
    Path("model.gguf").write_text("x")
    with pytest.raises(ModelNotFound, match=r"model.gguf: found a file, expected a folder"):
        resolve("model.gguf")


def test_near_names_are_suggested(cache):
    with pytest.raises(ModelNotFound, match=r"did you mean llama-3-8b-262k or "):
        resolve("llama3-8b-262k")
    with pytest.raises(ModelNotFound, match=r"--list-models"):
        resolve("qqqq")


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_warm_cache_makes_no_network_call(cache, fake, monkeypatch, offline, shards):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", offline)
    alias = ALIASES["yi-9b-200k"]
    snapshot = cached(cache, alias.hub_id, shards)
    for name in ("yi-9b-200k", "YI-9B-200K", alias.hub_id):
        found = resolve(name)
        assert (found.folder, found.source, found.revision) == (snapshot, "cache", REVISION)
        assert found.hub_id == alias.hub_id and found.alias == (alias if "/" not in name else None)
    assert not fake.calls


@pytest.mark.parametrize("gone", ["config.json", SINGLE, "model-00002-of-00003.safetensors"])
def test_partial_download(cache, fake, monkeypatch, gone):
    """An interrupted download is resumed online, and named offline; never handed to the loader."""
    hub_id = "org/name"
    snapshot = cached(cache, hub_id, 3 if "-of-" in gone else 1)
    kept = (snapshot / gone).resolve()
    (snapshot / gone).unlink()

    def finish(hub_id):
        (snapshot / gone).symlink_to(kept)
        return snapshot

    fake.answer = finish
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        HubError,
        match=f"org/name: partial download in .*: {gone} is missing, and HF_HUB_OFFLINE is set",
    ):
        resolve(hub_id)
    assert not fake.calls
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    told = []
    found = resolve(hub_id, progress=told.append)
    assert (found.source, found.revision, len(fake.calls)) == ("hub", REVISION, 1)
    assert told == [f"resuming {hub_id} into {cache}"]


def test_a_shard_that_is_a_dead_link_counts_as_missing(cache, fake, monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = cached(cache, "org/name", 3)
    (snapshot / "model-00003-of-00003.safetensors").resolve().unlink()
    with pytest.raises(HubError, match="model-00003-of-00003.safetensors is missing"):
        resolve("org/name")


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": [1]}}',
        "[" * 99999,
    ],
)
def test_a_damaged_index_is_left_to_the_loader(cache, fake, index):
    """It says what is wrong with it; here it only must not crash or cause a download."""
    snapshot = cached(cache, "org/name", 2)
    (snapshot / INDEX).unlink()
    (snapshot / INDEX).write_text(index)
    try:
        assert resolve("org/name").source == "cache"
    except (HubError, UnsupportedCheckpoint) as error:
        pytest.fail(str(error))


def test_a_plan_from_the_table_says_nothing_of_fetching(cache, fake):
    """Offline it began with "fetching" and spoke of a download to resume."""
    fake.answer = raising(hub_error("LocalEntryNotFoundError", "down"))
    told = []
    assert resolve("llama-3.1-8b", told.append, config_only=True).source == "table"
    assert told == []
    with pytest.raises(HubError):
        resolve("org/name", told.append, config_only=True)
    assert told == ["fetching config.json of org/name"]


def test_config_only_is_content_with_the_config(cache, fake):
    """A plan needs no weights; a load after it does."""
    snapshot = cached(cache, "org/name")
    (snapshot / SINGLE).unlink()
    assert resolve("org/name", config_only=True).source == "cache"
    fake.answer = raising(hub_error("LocalEntryNotFoundError", "down"))
    with pytest.raises(HubError):
        resolve("org/name")
    shutil.rmtree(snapshot)
    fake.calls.clear()

    def fetch(hub_id):
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        return snapshot

    fake.answer = fetch
    assert resolve("org/name", config_only=True).source == "hub"
    assert not any(
        "safetensors" in pattern
        for pattern in fake.calls[0][1]["allow_patterns"]
        if "index" not in pattern
    )


# ---------------------------------------------------------------- the hub


def test_download_fetches_what_is_needed_and_no_more(cache, fake):
    fake.answer = lambda hub_id: cached(cache, hub_id, 2)
    told = []
    found = resolve("llama-3-8b-262k", progress=told.append)
    assert (found.source, found.hub_id, found.revision) == (
        "hub",
        "gradientai/Llama-3-8B-Instruct-262k",
        REVISION,
    )
    assert told == [f"fetching {found.hub_id} into {cache}"]
    ((hub_id, options),) = fake.calls
    assert (
        hub_id == found.hub_id and options["allow_patterns"] == PATTERNS and "token" not in options
    )
    files = [
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "model.safetensors",
        INDEX,
        "model-00001-of-00004.safetensors",
        "tokenizer_config.json",
        "chat_template.jinja",
    ]
    unwanted = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "model.gguf",
        "README.md",
        "onnx/model.onnx",
        "original/model.safetensors",
        "tf_model.h5",
        "modeling_yi.py",
        "adapter_model.safetensors",
    ]
    filtered = list(hub.utils.filter_repo_objects(files + unwanted, allow_patterns=PATTERNS))
    assert filtered == files
    assert resolve("llama-3-8b-262k").source == "cache"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            hub_error("GatedRepoError", status=403),
            HubError,
            ["org/name: gated", "huggingface.co/org/name", "HF_TOKEN"],
        ),
        (
            hub_error("RepositoryNotFoundError", status=404),
            ModelNotFound,
            ["the hub has no org/name", "private", "HF_TOKEN"],
        ),
        (
            hub_error(
                "LocalEntryNotFoundError",
                "x",
                cause=ConnectionError("Name or service not known\nhint"),
            ),
            HubError,
            ["cannot be reached", "not or not wholly in the cache", "and run again"],
        ),
        (
            hub_error("HfHubHTTPError", "401 Client Error", 401),
            HubError,
            ["the hub answered 401", "check HF_TOKEN"],
        ),
        (
            hub_error("HfHubHTTPError", "429 Too Many Requests", 429),
            HubError,
            ["the hub answered 429", "run again"],
        ),
        (
            hub_error("HfHubHTTPError", "503 Server Error\nid: 7", 503),
            HubError,
            ["the hub answered 503", "503 Server Error"],
        ),
        (
            OSError(28, "No space left on device"),
            HubError,
            ["download failed", "No space left on device"],
        ),
        (TimeoutError(), HubError, ["download failed: TimeoutError", "run again to resume"]),
        (
            RuntimeError("xet: chunk \x1b[31m mismatch"),
            HubError,
            ["download failed: RuntimeError", "mismatch"],
        ),
    ],
)
def test_every_no_of_the_hub_is_one_line(cache, fake, error, kind, words):
    fake.answer = raising(error)
    with pytest.raises(kind) as caught:
        resolve("org/name")
    line = str(caught.value)
    assert (
        type(caught.value) is kind and "\n" not in line and "\x1b" not in line and len(line) < 400
    )
    assert all(word in line for word in words), line
    assert caught.value.__cause__ is error  # for --verbose


def test_ctrl_c_in_a_download_is_ctrl_c(cache, fake):
    fake.answer = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        resolve("org/name")


def test_offline_and_cold(cache, fake, monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    for name, options in (("yi-9b-200k", {}), ("01-ai/Yi-9B-200K", {"config_only": True})):
        with pytest.raises(
            HubError, match=r"01-ai/Yi-9B-200K: not in the cache .*, and HF_HUB_OFFLINE is set"
        ):
            resolve(name, **options)
    assert not fake.calls


@pytest.mark.parametrize(
    ("files", "kind", "words"),
    [
        (
            ["config.json", "tokenizer.json"],
            UnsupportedCheckpoint,
            "no model.safetensors on the hub",
        ),
        (["README.md"], UnsupportedCheckpoint, "no config.json on the hub"),
        (
            ["config.json", INDEX],
            HubError,
            "names ghost.safetensors, which the repository does not hold",
        ),
    ],
)
def test_a_repository_that_is_no_model_of_ours(cache, fake, files, kind, words):
    def fetch(hub_id):
        folder = cache / f"models--{hub_id.replace('/', '--')}" / "snapshots" / REVISION
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).write_text(json.dumps({"weight_map": {"a": "ghost.safetensors"}}))
        return folder

    fake.answer = fetch
    with pytest.raises(kind, match=words):
        resolve("org/name")


def test_a_cache_that_cannot_be_read_is_named(cache, fake, monkeypatch):
    monkeypatch.setattr(
        hub,
        "snapshot_download",
        lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied")),
    )
    with pytest.raises(
        HubError,
        match=f"cache {cache} cannot be read: PermissionError: .*Permission denied; see HF_HOME",
    ):
        resolve("org/name")


def test_without_the_client_the_remedy_is_named(cache, monkeypatch):
    """An import error must never read as "unsupported" or "not found"."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        HubError, match="huggingface_hub cannot be imported .*: install it, or name a folder"
    ):
        resolve("yi-9b-200k")
    sound(Path("m"))
    assert resolve("m").source == "folder"


def test_environment_is_obeyed_by_a_real_client(tmp_path):
    """HF_HOME and HF_HUB_OFFLINE in a process of their own: warm cache found, cold name refused, no
    connection tried.
    """
    snapshot = cached(tmp_path / "home" / "hub", "01-ai/Yi-9B-200K")
    code = (
        "import socket\n"
        "def refuse(*a, **k): raise SystemExit('network used')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from weights.resolve import resolve\n"
        "print(resolve('yi-9b-200k').folder)\n"
        "try: resolve('yi-6b-200k')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    env.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        cwd=Path(module.__file__).parents[1],
    )
    lines = done.stdout.splitlines()
    assert lines[0] == str(snapshot), done.stderr
    assert (
        lines[1].startswith("HubError 01-ai/Yi-6B-200K: not in the cache")
        and str(tmp_path / "home" / "hub") in lines[1]
    )


def test_a_plan_of_an_alias_needs_no_hub(cache, fake):
    """Where config.json cannot be had the table's sizes stand for it, for a plan alone."""
    fake.answer = raising(hub_error("GatedRepoError", "accept", 403))
    found = resolve("llama-3.1-8b", config_only=True)
    assert found.source == "table" and found.sizes["num_hidden_layers"] == 32
    with pytest.raises(HubError, match="gated"):
        found.require_fetched()
    for name, only in (("llama-3.1-8b", False), ("meta-llama/Llama-3.1-8B-Instruct", True)):
        with pytest.raises(HubError, match="gated"):
            resolve(name, config_only=only)
    sound(Path("mine"))
    here = resolve("mine", config_only=True)
    assert here.sizes is None
    here.require_fetched()
