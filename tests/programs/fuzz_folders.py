"""Mutated model folders through the command line: each is one error line or an answer.

    python -m tests.programs.fuzz_folders --count 20000 --seed 1      tens of minutes on one core
    python -m tests.programs.fuzz_folders --only 1:1234 --keep DIR    case 1234 of seed 1 again,
    kept in DIR

Files mutated: config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
chat_template.jinja, the header of model.safetensors, the index of a sharded model, omnikv.json,
pod.json. A failure is a traceback, an error without a type, more than one error line or one over
its length, a signal, over 30 s, or over 1.2 GB of memory. Cases run in forked children, some
hundred in each; a child that dies is replaced, and the case it ran is the failure.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

BATCH = 200  # cases of one child
SECONDS = 30.0
MEMORY = 1_200_000_000  # bytes, of address space beyond what the child begins with, and resident
LINE = 300 + len("error: ")
PROMPT = "hi aaaaaaaaaaaaaaaaaaaaaaaaaaaa! é"
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "omnikv.json",
    "pod.json",
)
ESC = "\x1b]0;TITLE\x07\x1b[31m"
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    256,
    4096,
    2**31,
    2**32 - 1,
    2**63,
    10**30,
    -(2**63),
    0.0,
    0.5,
    -0.0,
    1e-400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "x",
    "llama",
    "auto",
    "0",
    ESC,
    "\ud800",
    "\u0000",
    "é" * 50,
    "x" * 5000,
    "../../../etc/passwd",
    "/dev/zero",
    "float32",
    "F32",
    "BF16",
    "I8",
    "F4",
    "yarn",
    "llama3",
    "linear",
    "Regex",
    [],
    {},
    [[]],
    [0],
    [1, 2],
    ["x"],
    [None],
    {"a": 1},
    {"type": "x"},
    [[0, 1], [2]],
    list(range(300)),
]
RAW = [
    b"1" + b"0" * 400,
    b"9" * 5000,
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"[" * 5000,
    b'{"a":' * 3000,
    b"[" * 900 + b"]" * 900,
    b'"\\ud800"',
    b'"\\u001b[2J"',
    b"tru",
    b"",
    b"\xff\xfe",
    b"{" * 50,
    b"[" + b"0," * 3000 + b"0]",
    b'"' + b"x" * 100_000 + b'"',
]
REGEXES = [
    "(a+)+$",
    "(a*)*b",
    "(",
    "[",
    "\\p{L}+",
    "(?=a)",
    "",
    "a{1,1000}",
    "(a|a)*$",
    ".",
    "\\s+",
]
TEMPLATES = [
    "{{ messages }}",
    "{{ messages[0].content }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ raise_exception('" + "no \\n\\x1b[31m" + "') }}",
    "{{ ''.__class__ }}",
    "{{ 'x' * 10**7 }}",
    "{{ 'x' * 10**12 }}",
    "{% if %}",
    "{{ bos_token }}",
    "{{ [1][9] }}",
    "{{ 1/0 }}",
    "{{ '\\ud800' }}",
    "{% for i in range(99) %}{{ i }}{% endfor %}",
    "{{ nope.x }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ lipsum(n=100) }}",
    "{{ cycler.__init__ }}",
    "{{ messages|tojson(indent=10000000) }}",
    "{{ (" * 60,
    "{{ '%999999999d'|format(1) }}",
    "{% set x = 'a' %}",
    "{{ strftime_now('%Y') }}",
    "{{ 2 ** 99999 }}",
]
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def bases() -> list[dict[str, bytes]]:
    """Sound folders: byte-level with a template and one file, byte-fallback and sharded."""
    from tests.engine.chat.chat_model import TEMPLATE, chat_model
    from tests.engine.text.tokenizers_made import byte_fallback, save
    from tests.tiny_model import CONFIG, INDEX, joined, packed, tensors
    from weights.fingerprint import fingerprint

    found = []
    with tempfile.TemporaryDirectory() as name:
        for kind in ("plain", "sharded"):
            folder = Path(name) / kind
            changes = {"num_hidden_layers": 3, "max_position_embeddings": 256}
            chat_model(folder, **changes)
            if kind == "sharded":
                save(byte_fallback(), folder, chat_template=TEMPLATE)
                (folder / "model.safetensors").unlink()
                config = {**CONFIG, **json.loads((folder / "config.json").read_text())}
                parts: list[dict] = [{}, {}]
                for number, (key, tensor) in enumerate(tensors(config).items()):
                    parts[number % 2][key] = tensor
                where = {}
                for number, part in enumerate(parts):
                    file = f"model-{number}.safetensors"
                    (folder / file).write_bytes(joined(*packed(part)))
                    where |= dict.fromkeys(part, file)
                (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
            else:
                (folder / "chat_template.jinja").write_text(TEMPLATE)
            digest = fingerprint(folder)
            calibration = {
                "format": 1,
                "filter_layers": [0],
                "wait_layers": 0,
                "fingerprint": digest,
            }
            (folder / "omnikv.json").write_text(json.dumps(calibration))
            blocks = {"format": 1, "blocks": [[0, 1], [2]], "fingerprint": digest}
            (folder / "pod.json").write_text(json.dumps(blocks))
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
            found.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    return found


# ---------------------------------------------------------------- mutations


def spots(value: object) -> list[tuple[object, object]]:
    """Every (container, key) of a JSON value."""
    found, todo = [], [value]
    while todo:
        node = todo.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, inner in list(items)[:400]:
            found.append((node, key))
            if isinstance(inner, (dict, list)) and inner:
                todo.append(inner)
    return found


def change_json(rng: random.Random, data: bytes) -> bytes:
    """Another value, key, type or order somewhere in a JSON text."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = spots(value) if isinstance(value, (dict, list)) else []
        if not places:
            break
        # keys near the top matter most
        node, key = rng.choice(places[:40] if rng.random() < 0.6 else places)
        match rng.randrange(7):
            case 0 | 1 | 2:
                node[key] = copy.deepcopy(rng.choice(VALUES))
            case 3:
                del node[key]
            case 4:
                node[key] = copy.deepcopy(rng.choice(places)[0])
            case 5 if isinstance(node, dict):
                node[rng.choice(list(node)) + rng.choice(("", "_", "x", ESC))] = 5
            case _:
                raw = json.dumps(value).encode()
                spelled = json.dumps(node[key]).encode()
                return raw.replace(spelled, rng.choice(RAW), 1)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, doubled or put in."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 16, 300))
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = rng.randbytes(size)
            case 3:
                data[at:at] = data[at : at + size]
            case _:
                data[at:at] = rng.choice(RAW)[:2000]
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data)


def change_header(rng: random.Random, data: bytes) -> bytes:
    """The JSON, the length or the data of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    kind = rng.random()
    if kind < 0.15:
        length = rng.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1))
        return (length % 2**64).to_bytes(8, "little") + header + rest
    if kind < 0.3:
        return data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + rng.randbytes(9)
    header = change_json(rng, header) if kind < 0.8 else change_bytes(rng, header)
    return len(header).to_bytes(8, "little") + header + rest


def replacement(rng: random.Random) -> dict:
    """A part of a tokenizer that replaces text."""
    pattern = {"String": rng.choice(("a", "", " ", "é"))}
    if rng.random() < 0.5:
        pattern = {"Regex": rng.choice(REGEXES)}
    content = rng.choice(("", "a", "aa", "b" * 10, "b" * 1000, "b" * 1_000_000, ESC))
    return {"type": "Replace", "pattern": pattern, "content": content}


def change_tokenizer(rng: random.Random, data: bytes) -> bytes:
    """A part that grows, never ends or does not exist, or any other change."""
    if rng.random() < 0.5:
        return (change_json if rng.random() < 0.7 else change_bytes)(rng, data)
    value = json.loads(data)
    parts = [replacement(rng) for _ in range(rng.choice((1, 2, 9, 30)))]
    split = {
        "type": "Split",
        "pattern": {"Regex": rng.choice(REGEXES)},
        "behavior": rng.choice(("Isolated", "Removed", "Merged", "Contiguous")),
        "invert": rng.random() < 0.3,
    }
    token = {
        "id": rng.choice((0, 5, 300, 511, 512, 10**6, 2**32 - 1, 2**40)),
        "content": rng.choice(("", "a", "<x>", " ", "é" * 999, ESC, "<s>")),
        "single_word": rng.random() < 0.5,
        "lstrip": rng.random() < 0.5,
        "rstrip": rng.random() < 0.5,
        "normalized": rng.random() < 0.5,
        "special": rng.random() < 0.5,
    }
    pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * rng.choice((1, 3, 5000))
    around = {
        "type": "TemplateProcessing",
        "single": [*pieces, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {
            "<s>": {"id": "<s>", "ids": [rng.choice((1, 99999))] * len(pieces), "tokens": ["<s>"]}
        },
    }
    match rng.randrange(7):
        case 0:
            value["normalizer"] = {"type": "Sequence", "normalizers": parts}
        case 1:
            value["normalizer"] = {"type": "Prepend", "prepend": rng.choice(("▁", "b" * 100_000))}
        case 2:
            value["pre_tokenizer"] = {
                "type": "Sequence",
                "pretokenizers": [split] * rng.choice((1, 9)),
            }
        case 3:
            value["decoder"] = {"type": "Sequence", "decoders": parts}
        case 4:
            value["added_tokens"] += [token] * rng.choice((1, 2, 50))
        case 5:
            value["post_processor"] = around
        case _:
            table = rng.choice(("", "AAAA", "x", "////" * 500))
            value["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}
    return json.dumps(value).encode()


def change_template(rng: random.Random, data: bytes) -> bytes:
    """Pieces of templates, a loop without end now and then, or changed bytes."""
    if rng.random() < 0.01:
        return FOREVER.encode()
    if rng.random() < 0.4:
        return change_bytes(rng, data)
    pieces = [data.decode("utf-8", "replace"), *rng.choices(TEMPLATES, k=rng.choice((1, 2, 3)))]
    rng.shuffle(pieces)
    return "".join(pieces).encode()


def change_settings(rng: random.Random, data: bytes) -> bytes:
    """tokenizer_config.json; often its template."""
    if rng.random() < 0.5:
        return change_json(rng, data)
    value = json.loads(data)
    template = change_template(rng, b"{{ messages[0].content }}").decode("utf-8", "replace")
    named = [{"name": rng.choice(VALUES), "template": rng.choice((template, 5, None))}]
    value["chat_template"] = rng.choice((template, template, named, named * 2, rng.choice(VALUES)))
    return json.dumps(value).encode()


CHANGES = {
    "model.safetensors": change_header,
    "tokenizer.json": change_tokenizer,
    "tokenizer_config.json": change_settings,
    "chat_template.jinja": change_template,
}


def change_kind(rng: random.Random, path: Path) -> None:
    """Put another thing in a file's place: a pipe, a device, a folder, a link, 3 GB of zeros."""
    path.unlink(missing_ok=True)
    match rng.randrange(7):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to(rng.choice(("/dev/zero", "/etc/passwd", "/proc/kmsg", "x")))
        case 2:
            path.mkdir()
        case 3:
            path.symlink_to(path.name)
        case 4 | 5:
            path.touch()
            os.truncate(path, rng.choice((0, 1, 3 * 10**9)))


def make(seed: int, number: int, sound: list[dict[str, bytes]], folder: Path) -> str:
    """Write case `number` of a seed; return what was changed."""
    rng = random.Random(f"{seed}:{number}")
    files = dict(rng.choice(sound))
    said = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice([name for name in FILES if name in files])
        change = CHANGES.get(name, change_json if rng.random() < 0.8 else change_bytes)
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            files[name] = change(rng, files[name])
        said.append(name)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if rng.random() < 0.06:
        name = rng.choice(FILES)
        change_kind(rng, folder / name)
        said.append(f"kind of {name}")
    return ", ".join(said)


# ---------------------------------------------------------------- one case


def judge(folder: Path, number: int) -> str:
    """What is wrong with what the command line does with a folder; "" where nothing is."""
    from engine.base.device import NO_MEMORY
    from engine.base.errors import EngineError
    from engine.chat.cli import main
    from tools.calibrate.pod_groups import read_blocks

    flags = ["--model", str(folder), "-p", PROMPT, "-n", "2", "--threads", "1", "--device", "cpu"]
    flags += [["--quiet"], ["--method", "omnikv"], ["--plan"], ["--json"]][number % 4]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(flags)
    lines = err.getvalue().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if code not in (0, 1, 2) or (code != 0) != (len(errors) == 1) or len(errors) > 1:
        return f"exit code {code} with {len(errors)} error lines: {err.getvalue()[-300:]!r}"
    if any("shows where" in line for line in errors):
        return f"no type: {errors[0]!r}"
    # one line, but after more memory was asked for than a folder may take
    if any(NO_MEMORY in line for line in errors):
        return f"over {MEMORY / 1e9:.1f} GB of memory: {errors[0]!r}"
    if any(len(line) > LINE for line in errors) or any("\x1b" in line for line in lines):
        return f"a line of {max(map(len, lines))} characters, or with an escape sequence"
    try:
        read_blocks(folder)
    except EngineError as error:
        if len(str(error)) > 1000 or "\x1b" in str(error):
            return f"pod.json: {error}"[:300]
    return ""


def share_template_worker() -> None:
    """Render in one child for all cases: starting one takes 0.1 s. Its limits are the same."""
    from engine.text.sandbox import template

    kept: list[template._Worker] = []
    made = template.ChatTemplate.render

    def render(self: template.ChatTemplate, *arguments: object) -> str:
        self._worker = kept.pop() if kept else None
        try:
            return made(self, *arguments)
        finally:
            if self._worker is not None:
                kept.append(self._worker)
                self._worker = None

    template.ChatTemplate.render = render


def child(
    seed: int, numbers: list[int], sound: list[dict[str, bytes]], root: Path, out: int
) -> None:
    """Run cases; write `number`, then `number verdict` as JSON lines."""
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)  # Rust's panics write there
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    share_template_worker()
    stacks = (root / "stacks").open("w")
    faulthandler.enable(stacks)
    for number in numbers:
        os.write(out, json.dumps([number]).encode() + b"\n")
        faulthandler.dump_traceback_later(SECONDS - 5, file=stacks)
        folder = root / f"case{number}"
        changed = make(seed, number, sound, folder)
        try:
            found = judge(folder, number)
        except BaseException:
            found = traceback.format_exc()[-1500:]
        shutil.rmtree(folder, ignore_errors=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if peak > MEMORY:
            found = found or f"{peak / 1e9:.2f} GB resident"
        os.write(out, json.dumps([number, changed, found, peak]).encode() + b"\n")


def run(seed: int, numbers: list[int], say: bool = True) -> tuple[list[str], float, int]:
    """Run cases; (failures, longest case in seconds, peak bytes of a child)."""
    import tools.calibrate.pod_groups  # noqa: F401  (children are forked with everything imported)

    sound, failures, longest, peak = bases(), [], 0.0, 0
    left, began = list(numbers), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        while left:
            batch = left[:BATCH]
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.close(reader)
                    child(seed, batch, sound, Path(name), writer)
                    status = 0
                finally:
                    os._exit(status)
            os.close(writer)
            done, running, slowest, top = follow(reader, failures)
            longest, peak = max(longest, slowest), max(peak, top)
            os.close(reader)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if running is not None:
                where = (Path(name) / "stacks").read_text(errors="replace")[-1500:]
                failures.append(f"case {running}: died or hung (status {status}); {where}")
                print(failures[-1], flush=True)
                done.append(running)
            left = left[len(done) :] if done else left[1:]
            if say:
                n, spent = len(numbers) - len(left), time.monotonic() - began
                print(f"{n} of {len(numbers)}, {len(failures)} failures, {spent:.0f} s, longest "
                      f"{longest:.1f} s, peak {peak / 1e6:.0f} MB", flush=True)  # fmt: skip
    return failures, longest, peak


def follow(reader: int, failures: list[str]) -> tuple[list[int], int | None, float, int]:
    """Read a child's lines to its end; (cases done, the one it died in, longest, peak bytes)."""
    done: list[int] = []
    running, longest, peak, rest = None, 0.0, 0, b""
    began = time.monotonic()
    while select.select([reader], [], [], max(0.0, began + SECONDS - time.monotonic()))[0]:
        data = os.read(reader, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            number, *verdict = json.loads(line)
            if not verdict:
                running, began = number, time.monotonic()
                continue
            longest, peak = max(longest, time.monotonic() - began), max(peak, verdict[2])
            done.append(number)
            running = None
            if verdict[1]:
                failures.append(f"case {number} ({verdict[0]}): {verdict[1]}")
                print(failures[-1], flush=True)
    return done, running, longest, peak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.fuzz_folders")
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="SEED:CASE", help="run one case")
    parser.add_argument("--keep", metavar="DIR", help="only write the case of --only there")
    options = parser.parse_args()
    if options.keep:
        seed, number = map(int, options.only.split(":"))
        print(make(seed, number, bases(), Path(options.keep)))
        return 0
    seed, numbers = options.seed, list(range(options.count))
    if options.only:
        seed, number = map(int, options.only.split(":"))
        numbers = [number]
    failures, longest, peak = run(seed, numbers)
    print("\n".join([f"{len(failures)} failures", *failures]))
    print(f"{len(numbers)} folders, longest {longest:.1f} s, peak {peak / 1e6:.0f} MB")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
