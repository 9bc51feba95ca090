"""POST /v1/completions: raw prompts, as text or token ids, one or many.

Choice `i * n + j` is answer j to prompt i. The prompts run at once, each as its own request `<id>-<i>`.

Stands at forms 1 and 9 of a request.    vLLM: entrypoints/openai/completion/{api_router,serving}.py
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mini_engine.outputs import CompletionOutput, RequestOutput
from mini_engine.server.format import Choice, ChunkFormatter, to_json
from mini_engine.server.logprobs import completion_logprobs
from mini_engine.server.middleware import read_body
from mini_engine.server.protocol import CompletionRequest, parse_request
from mini_engine.server.respond import GenerationResponse, Outputs
from mini_engine.server.service import Service, service_of

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(raw: Request) -> Response:
    service = service_of(raw)
    request = parse_request(CompletionRequest, body := await read_body(raw, service.config.max_body_bytes))
    prompts = request.prompts()
    params = request.to_sampling_params(service.default_sampling_params)
    service.check_request(request, params, len(body), len(prompts))
    formatter = CompletionFormatter(request, service, request.request_id or raw.scope["mini_engine.request_id"])

    async def submit(i: int, prompt: str | list[int]) -> Outputs:
        renderer = service.engine.renderer
        if isinstance(prompt, str):
            text, prompt_token_ids = prompt, await renderer.tokenize_prompt(prompt, add_special_tokens=request.add_special_tokens)
        else:
            echoed = request.echo and len(prompt) < service.max_model_len  # a longer one is refused soon: its text is for nobody
            text, prompt_token_ids = (renderer.tokenizer.decode(prompt) if echoed else ""), prompt
        formatter.prompt_texts[i] = text
        return service.engine.generate(
            prompt_token_ids, params, f"{formatter.base['id']}-{i}", prompt=text, priority=request.priority, cache_salt=request.cache_salt
        )

    async def prepare() -> Outputs:
        submitted = [await submit(i, prompt) for i, prompt in enumerate(prompts)]
        return submitted[0] if len(submitted) == 1 else merge(submitted)

    return GenerationResponse(service, prepare, formatter, stream=request.stream)


async def merge(sources: list[Outputs]) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of all sources as they come. The first exception ends all; closing this closes every source.

    A source waits until its output is taken, so a slow reader meets the collectors' coalescing here too.
    """
    ready: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(source: Outputs) -> None:
        try:
            async with aclosing(source):
                async for output in source:
                    await ready.put(output)
        except Exception as e:
            await ready.put(e)
        else:
            await ready.put(None)  # this source has ended

    pumps = [asyncio.create_task(pump(source), name="completion-prompt") for source in sources]
    try:
        running = len(pumps)
        while running:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)


class CompletionFormatter(ChunkFormatter):
    object_name = chunk_object_name = "text_completion"
    id_prefix = "cmpl"
    text_key, text_end = b'"text":', b""

    def __init__(self, request: CompletionRequest, service: Service, request_id: str) -> None:
        super().__init__(request, service, request_id)
        self.request: CompletionRequest = request
        self.prompt_texts: dict[int, str] = {}

    def response_index(self, output: RequestOutput, completion: CompletionOutput) -> int:
        return prompt_index(output) * self.request.n + completion.index

    def opening(self, choice: Choice, output: RequestOutput) -> list[bytes]:
        if not self.request.echo:
            return []
        return [choice.head + to_json(self.prompt_texts[prompt_index(output)]) + self.plain_tail]

    def choice_logprobs(self, choice: Choice) -> dict[str, Any]:
        as_ids = self.request.return_tokens_as_token_ids
        lists = completion_logprobs(choice.token_ids, choice.logprobs, self.request.logprobs or 0, as_ids, choice.offset)
        choice.offset += sum(map(len, lists["tokens"]))
        return lists

    def whole_choice(self, choice: Choice, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        return {"text": (self.prompt_texts[prompt_index(output)] if self.request.echo else "") + completion.text}


def prompt_index(output: RequestOutput) -> int:
    return int(output.request_id.rpartition("-")[2])
