"""Run `python -m examples.long_document` from the repository's root:
a document read once, then several questions, each in a fork of its session.
"""

from pathlib import Path

from engine import LLM, OmniKV

DOCUMENT = Path("weights/pocket/welcome.txt").read_text(encoding="utf-8")
QUESTIONS = ["What is the pass key of Alice?", "What is the value of r261?"]


def main() -> None:
    """Print each answer and how many tokens the sparse layers read to give it."""
    # dense_below=0: be sparse at any length, even where full attention would read less
    llm = LLM("weights/pocket", max_context=4096, method=OmniKV(tokens=64, dense_below=0))
    messages = [{"role": "system", "content": DOCUMENT}]
    head = llm.tokenizer.render(messages, add_generation_prompt=False)

    with llm.session() as document:
        document.prefill(llm.tokenizer.encode(head, special=False))
        print(f"{len(document):,} tokens read once")
        for question in QUESTIONS:
            turn = f"<|user|>{question}<|assistant|>"  # as the model's chat template writes it
            with document.fork() as session:
                pieces = session.generate(llm.tokenizer.encode(turn, special=False))
                print(question, "->", "".join(piece.text for piece in pieces))
                for layer, positions in session.selections.items():
                    first, last = int(positions[0]), int(positions[-1])
                    print(f"  layer {layer} chose {len(positions)} tokens, {first} to {last}")


if __name__ == "__main__":
    main()
