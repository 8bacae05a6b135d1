"""Run `python -m examples.desktop_tool` from the repository's root:
a document asked beside a window: the model in a thread of its own, progress, and a stop button.
"""

import queue
import threading
from pathlib import Path

from engine import LLM, EngineError, SamplingParams

DOCUMENT = Path("weights/pocket/welcome.txt").read_text(encoding="utf-8")
events: queue.Queue = queue.Queue()  # what a window's timer takes, 20 times a second
stop = threading.Event()  # set by the stop button


def ask(llm: LLM, question: str) -> None:
    """Answer in this thread; tell the window what happens."""
    talk = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}]
    try:
        for piece in llm.stream(
            llm.chat_ids(talk),
            SamplingParams(max_tokens=24),
            progress=lambda p: events.put(f"[{p.work:.0%} read, {p.eta:.0f} s left]\n"),
            should_stop=stop.is_set,
        ):
            events.put(piece.text)
    except EngineError as error:  # too long a document, no memory: one sentence for a person
        events.put(f"\n{error}\n")
    events.put(None)


def main() -> None:
    llm = LLM("weights/pocket", max_context=4096, chunk=512)
    threading.Thread(target=ask, args=(llm, "What is the pass key of Alice?"), daemon=True).start()
    print("".join(iter(events.get, None)))


if __name__ == "__main__":
    main()
