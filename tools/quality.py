"""What int8 costs in quality, on the default model and a committed text: perplexity, and how often the likeliest token is the same.

    python tools/quality.py [--quantization int8]      a minute on two cores; the last line of stdout is one JSON object

Both runs read tests/data/quality/prose.txt, paragraph by paragraph, through the engine (prompt_logprobs): the exact one first. A token's
likeliest successor is compared at every position, given the *same* text: greedy texts, once they differ, go on differing for no reason
of quality.

No request path of its own; no vLLM counterpart.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mini_engine.config import EngineConfig
from mini_engine.engine_core.inproc import InprocClient
from mini_engine.model.default_model import resolve_model
from mini_engine.render.tokenizer import Tokenizer
from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.messages import EngineCoreRequest

TEXT = Path(__file__).resolve().parent.parent / "tests" / "data" / "quality" / "prose.txt"


def score(config: EngineConfig, prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """For every position but each prompt's first: the logprob of the token that is there, and the id of the likeliest one."""
    client = InprocClient(config)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    found: dict[str, Any] = {}
    try:
        for i, prompt in enumerate(prompts):
            client.add_request(EngineCoreRequest(str(i), prompt, None, params, None, time.time(), None, None, None))
        while client.engine_core.has_work():
            for output in client.get_output().outputs:
                found[output.request_id] = output.new_prompt_logprobs_tensors
    finally:
        client.shutdown()
    tensors = [found[str(i)] for i in range(len(prompts))]
    return np.concatenate([t.logprobs[:, 0] for t in tensors]), np.concatenate([t.logprob_token_ids[:, 1] for t in tensors])


def measure(model: str, text: str, quantization: str, num_threads: int | None = None) -> dict[str, Any]:
    directory = resolve_model(model)
    tokenizer = Tokenizer.load(directory)
    prompts = [ids for paragraph in text.split("\n\n") if len(ids := tokenizer.encode(paragraph)) > 1]
    exact, best = score(EngineConfig(str(directory), num_threads=num_threads), prompts)
    other, other_best = score(EngineConfig(str(directory), quantization=quantization, num_threads=num_threads), prompts)
    return {
        "quantization": quantization,
        "tokens": len(exact),
        "perplexity_float32": round(math.exp(-float(exact.mean())), 4),
        "perplexity": round(math.exp(-float(other.mean())), 4),
        "same_likeliest_token": round(float((best == other_best).mean()), 4),
        "mean_logprob_difference": round(float(np.abs(exact - other).mean()), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="what a quantization costs in quality")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--quantization", default="int8", choices=["none", "int8"])
    args = parser.parse_args()
    print(json.dumps(measure(args.model, TEXT.read_text(encoding="utf-8"), args.quantization)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
