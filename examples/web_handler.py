"""Run `python -m examples.web_handler` from the repository's root: a handler of a web server
(`uvicorn examples.web_handler:app` serves it; this needs httpx too), asked by three clients.
"""

import asyncio

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from engine import LLM, AsyncLLM, SamplingParams

KEYS = "The pass key of Alice is 66160. The pass key of Bob is 41213."
llm = AsyncLLM(LLM("weights/pocket", max_context=1024), slots=2, waiting=100)


async def answer(request: Request) -> StreamingResponse:
    """Stream the answer to /NAME; when the client leaves, the answer ends and its slot is free."""
    question = f"What is the pass key of {request.path_params['name']}?"
    talk = [{"role": "system", "content": KEYS}, {"role": "user", "content": question}]
    pieces = llm.stream(await llm.chat_ids(talk), SamplingParams(max_tokens=24))
    return StreamingResponse((piece.text async for piece in pieces), media_type="text/plain")


app = Starlette(routes=[Route("/{name}", answer)])


async def main() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        urls = [f"http://here/{name}" for name in ("Alice", "Bob", "Alice")]
        for reply in await asyncio.gather(*map(client.get, urls)):
            print(reply.url.path[1:], "->", reply.text)
    await llm.aclose()


if __name__ == "__main__":
    asyncio.run(main())
