"""Run `python -m examples.generate` from the repository's root:
one question, answered whole and as a stream by the model in the box.
"""

from engine import LLM, SamplingParams

MESSAGES = [
    {"role": "system", "content": "The pass key of Alice is 66160. The pass key of Bob is 41213."},
    {"role": "user", "content": "What is the pass key of Bob?"},
]


def main() -> None:
    """Print a completion, why it ended, and the same answer piece by piece."""
    llm = LLM("weights/pocket", max_context=1024)
    greedy = SamplingParams(max_tokens=32)

    answer = llm.chat(MESSAGES, greedy)
    print(f"{answer.text}  ({answer.stats.new_tokens} tokens, {answer.finish_reason})")

    prompt = llm.tokenizer.render(MESSAGES, add_generation_prompt=True)
    for piece in llm.stream(llm.tokenizer.encode(prompt, special=False), greedy):
        print(piece.text, end="|", flush=True)
    print()


if __name__ == "__main__":
    main()
