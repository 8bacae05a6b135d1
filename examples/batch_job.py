"""Run `python -m examples.batch_job` from the repository's root:
a hundred questions about one document: four at once, the document read once for each slot.
"""

import asyncio
from pathlib import Path

from engine import LLM, AsyncLLM, EngineError, OmniKV, SamplingParams

DOCUMENT = Path("weights/pocket/welcome.txt").read_text(encoding="utf-8")
QUESTIONS = ["What is the pass key of Alice?", "What is the value of r261?"] * 50


async def main() -> None:
    """Print the answers that differ, and what was read to give them."""
    method = OmniKV(tokens=256, dense_below=0)  # sparse also where full attention would read less
    llm = LLM("weights/pocket", max_context=2048, method=method)

    async with AsyncLLM(llm, slots=4) as many:

        async def answer(question: str):
            talk = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}]
            try:
                return await many.chat(talk, SamplingParams(max_tokens=16))
            except EngineError as error:  # one that fails stops no other
                print(f"{question}: {error}")

        found = await asyncio.gather(*map(answer, QUESTIONS))
    done = [one for one in found if one is not None]
    for text in sorted({one.text for one in done}):
        print(text.strip(), "x", sum(one.text == text for one in done))
    read = sum(one.stats.prompt_tokens for one in done)
    held = sum(one.stats.cached_tokens for one in done)
    print(f"{len(done)} answers: {read:,} tokens read, {held:,} found read")


if __name__ == "__main__":
    asyncio.run(main())
