"""POST /v1/chat/completions.

Stream: one role chunk per choice, one chunk per delta, one finish chunk per choice, the usage chunk if asked for, [DONE].

Stands at forms 1 and 9 of a request.    vLLM: entrypoints/openai/chat_completion/{api_router,serving}.py
"""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mini_engine.exceptions import VLLMValidationError
from mini_engine.outputs import CompletionOutput, RequestOutput
from mini_engine.server.format import Choice, ChunkFormatter, to_json
from mini_engine.server.logprobs import chat_logprobs
from mini_engine.server.middleware import read_body
from mini_engine.server.protocol import ChatCompletionRequest, parse_request
from mini_engine.server.respond import GenerationResponse, Outputs
from mini_engine.server.service import Service, service_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(raw: Request) -> Response:
    service = service_of(raw)
    request = parse_request(ChatCompletionRequest, body := await read_body(raw, service.config.max_body_bytes))
    params = request.to_sampling_params(service.default_sampling_params)
    service.check_request(request, params, len(body))
    if request.chat_template is not None and not service.config.trust_request_chat_template:
        raise VLLMValidationError("chat_template needs a server with --trust-request-chat-template", parameter="chat_template")
    messages = request.template_messages()
    formatter = ChatFormatter(request, service, request.request_id or raw.scope["mini_engine.request_id"])

    async def prepare() -> Outputs:
        prompt, prompt_token_ids = await service.engine.renderer.render_chat(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
            chat_template_kwargs=request.chat_template_kwargs,
            add_special_tokens=request.add_special_tokens,
        )
        return service.engine.generate(
            prompt_token_ids, params, formatter.base["id"], prompt=prompt, priority=request.priority, cache_salt=request.cache_salt
        )

    return GenerationResponse(service, prepare, formatter, stream=request.stream)


class ChatFormatter(ChunkFormatter):
    object_name, chunk_object_name, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    text_key, text_end = b'"delta":{"content":', b"}"

    def __init__(self, request: ChatCompletionRequest, service: Service, request_id: str) -> None:
        super().__init__(request, service, request_id)
        self.top_logprobs = request.top_logprobs
        # an answer that continues the last message has that message's role
        self.role = "assistant" if request.add_generation_prompt else request.messages[-1].role

    def opening(self, choice: Choice, output: RequestOutput) -> list[bytes]:
        role = b'{"index":%d,"delta":{"role":%b,"content":""' % (choice.index, to_json(self.role))
        return [b"".join((self.chunk_head, role, b'},"logprobs":null,"finish_reason":null', self.prompt_ids(choice), b"}", self.chunk_end))]

    def empty_text(self, choice: Choice) -> bytes:
        return self.chunk_head + b'{"index":%d,"delta":{' % choice.index  # text_end closes it: "delta":{}

    def choice_logprobs(self, choice: Choice) -> dict[str, Any]:
        content = chat_logprobs(choice.token_ids, choice.logprobs, self.top_logprobs, self.request.return_tokens_as_token_ids)
        return {"content": content, "refusal": None}

    def whole_choice(self, choice: Choice, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        return {"message": {"role": self.role, "content": completion.text, "refusal": None}}
