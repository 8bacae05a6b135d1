"""Run `python -m examples.compare_methods` from the repository's root:
the same question under several methods, what each holds and reads.
"""

from pathlib import Path

from engine import H2O, LLM, Full, OmniKV, Quest, SnapKV

DOCUMENT = Path("weights/pocket/welcome.txt").read_text(encoding="utf-8")
METHODS = [Full(), OmniKV(share=0.0667, dense_below=0), Quest(share=0.3), SnapKV(share=0.3)]
METHODS += [H2O(share=0.3)]  # 30% of the document, kept or read


def main() -> None:
    """Print a row per method: K and V held, K and V read per step, the answer."""
    llm = LLM("weights/pocket", max_context=4096)
    text = llm.tokenizer.render(
        [{"role": "system", "content": DOCUMENT}], add_generation_prompt=False
    )
    head = llm.tokenizer.encode(text, special=False)
    turn = llm.tokenizer.encode(
        "<|user|>What is the pass key of Alice?<|assistant|>", special=False
    )

    print(f"{'method':<10}{'held':>6}{'read':>6}  answer")
    for method in METHODS:
        with llm.session(method) as session:
            session.prefill(head)
            answer = "".join(piece.text for piece in session.generate(turn))
            stats = session.stats
            row = llm.config.num_layers * llm.config.kv_bytes(llm.dtype.itemsize)  # of a token
            read = (stats.bytes_read_sparse + stats.bytes_read_dense) / stats.decode_steps
            share = read / (row * len(session))
            print(f"{method.name:<10}{stats.resident:>6.0%}{share:>6.0%}  {answer}")


if __name__ == "__main__":
    main()
