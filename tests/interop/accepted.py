"""Where a pair's answers differ from those of our front-end over our engine, and why that is right. A difference without a row here fails,
and so does a row without a difference.

Not in the table, because no request shows it
    kill -9 of a headless engine    our front-end ends its streams within 3 s (it watches the connection). vLLM's own, Python and Rust,
                                    do not notice (WIRE §2.8): streams hang until their client gives up. An engine that can still speak
                                    sends ENGINE_CORE_DEAD, which all obey; under `serve --frontend rust` the supervisor ends the process.
    after ENGINE_CORE_DEAD          vLLM's Python server and ours exit; vllm-rs goes on and answers 503
    --api-server-count              /metrics is that of the process which answers; vLLM adds its processes up
What normalise.py takes away is listed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Accepted:
    pair: str  #: these three are patterns
    case: str
    path: str
    why: str

    def covers(self, pair: str, case: str, path: str) -> bool:
        return fnmatchcase(pair, self.pair) and fnmatchcase(case, self.case) and fnmatchcase(path, self.path)


ACCEPTED = [
    Accepted("vllm-rs/ours", "*, n", "*", "vllm-rs 0.32.0 refuses n > 1 itself: 400 'Only n=1 is supported', whatever the engine"),
    Accepted("vllm-rs/ours", "*, n, streamed", "*", "the same"),
    Accepted("vllm-rs/ours", "text, several prompts*", "*", "vllm-rs 0.32.0 takes one prompt per request: 400 'did not match any variant'"),
    Accepted("vllm-rs/ours", "bad: unknown field", "*", "vLLM ignores unknown fields; ours names them (DESIGN §2, fields)"),
    Accepted("vllm/ours", "bad: unknown field", "*", "the same"),
    Accepted("vllm/ours", "text, echo, streamed", "choices.0.prompt_token_ids", "vLLM sends them with an echo even when nobody asked"),
]
