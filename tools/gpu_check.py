"""`make gpu-check`: does the engine work on this machine's GPU, and how fast. One command, under four minutes on one card.

    python tools/gpu_check.py                          Qwen3-0.6B's shape, random weights, float32 then bfloat16
    python tools/gpu_check.py --tiny --device cpu      the same checks in seconds, on a tiny shape; a test runs this

Checks    In process, through scheduler, block tables and sampler: a mixed batch of prompts, chunked and batched. Every generated token's
          and every prompt token's logprob against transformers' logits for the same text; every token is transformers' argmax, unless
          the two best logits are closer than the tolerance (how many were, is printed).
Speed     Tokens per second of decoding at each batch size: prompts of 32 tokens, the first output excluded, one warm-up run before.
Needs     torch, transformers, tokenizers, msgspec, pydantic, numpy and what those bring along; the rest of mini_engine's requirements
          may be missing. No network: the model is made here, in a temporary directory.
Stdout    one line, a JSON object; progress goes to stderr. Exit status 1 when a check fails.

No request path of its own; no vLLM counterpart.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone is enough: nothing has to be installed

from mini_engine.config import EngineConfig
from mini_engine.engine_core.inproc import InprocClient
from mini_engine.sampling_params import SamplingParams
from mini_engine.wire.messages import EngineCoreOutput, EngineCoreRequest

QWEN3_0_6B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
TINY = QWEN3_0_6B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
#: largest difference of two logprobs, and the gap below which either of two tokens is right
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.5}
PROMPT_LENS = (1, 5, 16, 33, 100, 250, 600, 130)
OUTPUT_LEN = 32


def make_model(directory: Path, shape: dict[str, Any], device: str) -> None:
    """Random weights, all of them different from what an initialiser would leave: a forgotten norm or a wrong row shows."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, dtype="float32", bos_token_id=0, eos_token_id=0, pad_token_id=None))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                scale = 0.05 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else noise * scale)
    model.save_pretrained(directory)


def run(client: InprocClient, prompts: list[list[int]], params: SamplingParams) -> list[list[EngineCoreOutput]]:
    """All outputs of each prompt, in order. Raises RuntimeError when the engine refuses one."""
    outputs: dict[str, list[EngineCoreOutput]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        client.add_request(EngineCoreRequest(str(i), prompt, None, params, None, time.time(), None, None, None))
    unfinished = len(prompts)
    while unfinished:
        for output in client.get_output().outputs:
            outputs[output.request_id].append(output)
            unfinished -= output.finish_reason is not None
            if isinstance(output.stop_reason, str):
                raise RuntimeError(f"request {output.request_id} failed: {output.stop_reason}")
    return list(outputs.values())


def random_prompts(lengths: list[int], vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, vocab_size, n).tolist() for n in lengths]


def compare(client: InprocClient, reference: PreTrainedModel, vocab_size: int, tolerance: float) -> dict[str, Any]:
    """Engine against transformers. `wrong`: tokens that are not its argmax although the gap is clear."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompts = random_prompts(list(PROMPT_LENS), vocab_size)
    worst, wrong, close, total = 0.0, 0, 0, 0
    for prompt, outputs in zip(prompts, run(client, prompts, params), strict=True):
        tokens = [token for output in outputs for token in output.new_token_ids]
        ours = [float(output.new_logprobs.logprobs[0, 0]) for output in outputs if output.new_logprobs is not None]
        of_prompt = [output.new_prompt_logprobs_tensors for output in outputs if output.new_prompt_logprobs_tensors is not None]
        ours = [*(float(x) for tensors in of_prompt for x in np.asarray(tensors.logprobs)[:, 0]), *ours]
        text = torch.tensor([prompt + tokens], device=reference.device)
        with torch.inference_mode():
            logits = reference(text).logits[0, :-1].float()
        theirs = logits.log_softmax(-1).gather(1, text[0, 1:, None])[:, 0].cpu()
        assert len(ours) == len(theirs), "a logprob is missing"
        worst = max(worst, float((theirs - torch.tensor(ours)).abs().max()))
        (best, second), indices = logits[len(prompt) - 1 :].topk(2).values.T, logits[len(prompt) - 1 :].argmax(-1).cpu()
        differs = indices != torch.tensor(tokens)
        unclear = (best - second).cpu() < tolerance
        wrong, close, total = wrong + int((differs & ~unclear).sum()), close + int((differs & unclear).sum()), total + len(tokens)
    return {
        "max_logprob_difference": worst,
        "tokens": total,
        "wrong": wrong,
        "differ_in_a_tie": close,
        "passed": worst < tolerance and not wrong,
    }


def decode_speed(client: InprocClient, batch: int, vocab_size: int, output_len: int) -> float:
    """Tokens per second from the second token of the slowest prompt on."""
    prompts = random_prompts([32] * batch, vocab_size)
    run(client, prompts, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    client.call_utility("reset_prefix_cache")
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        client.add_request(EngineCoreRequest(str(i), prompt, None, params, None, time.time(), None, None, None))
    seen: dict[str, int] = {}
    start, before, unfinished = 0.0, 0, batch
    while unfinished:
        for output in client.get_output().outputs:
            seen[output.request_id] = seen.get(output.request_id, 0) + len(output.new_token_ids)
            unfinished -= output.finish_reason is not None
        if not start and len(seen) == batch:
            start, before = time.perf_counter(), sum(seen.values())
    return (sum(seen.values()) - before) / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description="check and measure the engine on a GPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and few tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} sees no GPU; the checks alone: --tiny --device cpu", file=sys.stderr)
        return 2
    shape, started = TINY if args.tiny else QWEN3_0_6B, time.monotonic()
    name = torch.cuda.get_device_name() if args.device != "cpu" else "cpu"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "tiny": args.tiny, "checks": {}, "tokens_per_s": {}}
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), shape, args.device)
        for dtype in args.dtypes:
            config = EngineConfig(
                directory,
                device=args.device,
                dtype=dtype,
                max_num_seqs=max(*args.batches, len(PROMPT_LENS)),
                max_num_batched_tokens=512,  # so that prompts are cut into chunks, and mixed with single tokens
                max_model_len=1024,
                gpu_memory_utilization=0.5,
                kv_cache_memory_bytes=64 << 20,
                check=True,
            )
            client = InprocClient(config)
            reference = Qwen3ForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval().to(args.device)
            report["checks"][dtype] = compare(client, reference, shape["vocab_size"], TOLERANCE[dtype])
            print(f"{dtype}: {report['checks'][dtype]}", file=sys.stderr)
            del reference
            if dtype == args.dtypes[-1]:
                for batch in args.batches:
                    speed = decode_speed(client, batch, shape["vocab_size"], 4 if args.tiny else 64)
                    report["tokens_per_s"][batch] = round(speed, 1)
                    print(f"{dtype}, batch {batch:>3}: {speed:>10,.1f} tokens/s", file=sys.stderr)
            client.shutdown()
            del client
    report["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(report), flush=True)
    return 0 if all(check["passed"] for check in report["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
