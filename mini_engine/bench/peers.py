"""The peers of `bench offline`, run as a script by an interpreter that need not have mini_engine: `PYTHON peers.py transformers|vllm`.

The work comes as JSON on stdin {model, prompts, output_len, threads, dtype}; the line of stdout that starts with {"seconds" is the
result. A short run warms up first, as in ours. Imports nothing of mini_engine.

No request path.    vLLM: benchmarks/throughput.py (its backends hf and vllm)
"""

import json
import os
import sys
import time
from typing import Any


def run_transformers(spec: dict[str, Any]) -> tuple[float, int]:
    """One static batch: all prompts have one length, so nothing is padded."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(spec["threads"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"])).eval()

    def generate(prompts: list[list[int]], count: int) -> int:
        ids = torch.tensor(prompts)
        options = {
            "do_sample": False,
            "min_new_tokens": count,
            "max_new_tokens": count,
            "pad_token_id": 0,
            "temperature": None,
            "top_p": None,
        }
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), top_k=None, **options)
        return (out.shape[1] - ids.shape[1]) * ids.shape[0]

    generate(spec["prompts"][:1], 2)
    start = time.perf_counter()
    tokens = generate(spec["prompts"], spec["output_len"])
    return time.perf_counter() - start, tokens


def run_vllm(spec: dict[str, Any]) -> tuple[float, int]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["OMP_NUM_THREADS"] = str(spec["threads"])
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    longest = max(map(len, spec["prompts"])) + spec["output_len"] + 1
    llm = LLM(spec["model"], dtype=spec["dtype"], max_model_len=max(longest, 256), enforce_eager=True)

    def generate(prompts: list[list[int]], count: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    generate(spec["prompts"][:1], 2)
    llm.reset_prefix_cache()
    start = time.perf_counter()
    tokens = generate(spec["prompts"], spec["output_len"])
    return time.perf_counter() - start, tokens


def main() -> None:
    run = {"transformers": run_transformers, "vllm": run_vllm}[sys.argv[1]]
    seconds, tokens = run(json.load(sys.stdin))
    print(json.dumps({"seconds": round(seconds, 3), "output_tokens": tokens, "tokens_per_s": round(tokens / seconds, 2)}), flush=True)


if __name__ == "__main__":
    main()
