"""A server that torchrun starts: `python -m tests.programs.torchrun_serve [--ranks N]`.

N ranks of `engine.serve` hold the shipped model. A client asks; while its answer streams, torchrun
gets SIGTERM, which it sends to all ranks. The answer must come to its end, and the server must say
`stopped` and that no rank was lost. Exit code 0, or 1 with what was said.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default 2)")
    args = parser.parse_args()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    command += ["-m", "engine.serve", "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    said, events = [], []
    try:
        for line in server.stderr:
            said.append(line)
            if "is ready" in line:
                break
        address = re.search(r"http://\S+/v1", said[-1] if said else "")
        if address is not None:
            asked = dict(prompt="a b c d", max_tokens=600, ignore_eos=True, stream=True)
            request = urllib.request.Request(
                f"{address[0]}/completions",
                json.dumps({"model": "pocket", **asked}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                answer.readline()
                server.terminate()
                events = [line for line in answer if line.startswith(b"data: ")]
        said += server.communicate(timeout=60)[1].splitlines(keepends=True)
    finally:
        server.kill()
        server.wait()
    ended = bool(events) and events[-1].strip() == b"data: [DONE]"
    whole = "".join(said)
    lost = [line for line in said if line.startswith(("error:", "rank "))]
    if not ended or "\nstopped\n" not in whole or lost:
        sys.stderr.write(whole)
        print(f"{len(events)} events, to their end: {ended}; {''.join(lost)}")
        return 1
    print(f"{args.ranks} ranks under torchrun: {len(events)} events after SIGTERM, then stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
