"""One engine of `bench offline`, in a process of its own: `PYTHON peers.py mini_engine|transformers|vllm|llama-cpp|machine`.

stdin     the first line is the set-up {model, threads, dtype, max_len, max_batch, engine, gguf}; each later line is a job {prompts,
          output_len}. All prompts of a job start at once, every answer has output_len tokens: greedy, EOS ignored, no prefix cache.
stdout    {"ready": …} when loaded and warm, then per job {"seconds": …, "output_tokens": …}. Other lines are talk (vLLM logs there).
Imports   each engine its own things only: the interpreter need not have mini_engine.

No request path.    vLLM: benchmarks/throughput.py (its backends hf and vllm)
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], int]  #: prompts, tokens per answer → tokens made


def mini_engine(setup: dict[str, Any]) -> Generate:
    from mini_engine import LLM, SamplingParams

    llm = LLM(**setup["engine"])

    def generate(prompts: list[list[int]], count: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    return generate


def transformers(setup: dict[str, Any]) -> Generate:
    """One static batch: all prompts have one length, so nothing is padded."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setup["threads"])
    model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=getattr(torch, setup["dtype"])).eval()

    def generate(prompts: list[list[int]], count: int) -> int:
        ids = torch.tensor(prompts)
        lengths = {"min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **greedy)
        return (out.shape[1] - ids.shape[1]) * ids.shape[0]

    return generate


def vllm(setup: dict[str, Any]) -> Generate:
    # nobind: as many threads as asked, on any core; by itself vLLM binds to some cores and keeps one for its front-end
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(setup["threads"])}
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # the CPU build is the distribution vllm-cpu; vLLM asks `vllm` for a +cpu version
        version = importlib.metadata.version
        importlib.metadata.version = lambda distribution_name: (
            version(distribution_name) if distribution_name != "vllm" else version("vllm-cpu") + "+cpu"
        )
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(setup["model"], dtype=setup["dtype"], max_model_len=setup["max_len"], enforce_eager=True, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], count: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def llama_cpp(setup: dict[str, Any]) -> Generate:
    """The GGUF as it is (Q4_1): less to read than any other. One prompt at a time."""
    from llama_cpp import Llama  # type: ignore[import-not-found]

    llm = Llama(setup["gguf"], n_ctx=setup["max_len"], n_threads=setup["threads"], n_threads_batch=setup["threads"], verbose=False)

    def generate(prompts: list[list[int]], count: int) -> int:
        for prompt in prompts:
            llm.reset()
            for made, _ in enumerate(llm.generate(prompt, temp=0.0), 1):
                if made == count:
                    break
        return len(prompts) * count

    return generate


def machine(setup: dict[str, Any]) -> Callable[[], dict[str, float]]:
    """Measures what these cores can do at the moment: bytes read per second from memory in huge pages, float32 operations per second in
    a large matrix product, torch's or ours, whichever is faster."""
    import torch

    from mini_engine.model import cpu_kernels

    torch.set_num_threads(setup["threads"])
    kernels, size = cpu_kernels.load(), 2048
    memory = cpu_kernels.HugePages(4 << 27).take(1 << 27).fill_(1.0)
    square = torch.randn(size, size)

    def best(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    products: list[Callable[[], Any]] = [lambda: square @ square]
    if kernels is not None:
        packed = cpu_kernels.CPULinear(kernels, cpu_kernels.HugePages(cpu_kernels.CPULinear.most_bytes(square)), square, None)
        products.append(lambda: packed(square))
    return lambda: {"read_bytes_per_s": memory.nbytes / best(memory.sum), "flop_per_s": 2 * size**3 / min(map(best, products))}


ENGINES: dict[str, Callable[[dict[str, Any]], Generate]] = {
    "mini_engine": mini_engine,
    "transformers": transformers,
    "vllm": vllm,
    "llama-cpp": llama_cpp,
}


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    if sys.argv[1] == "machine":
        measure = machine(setup)
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"seconds": 0.0} | measure()), flush=True)  # "seconds": by which offline.py knows an answer
        return
    generate = ENGINES[sys.argv[1]](setup)
    generate([[1, 2, 3, 4]] * min(2, setup["max_batch"]), 2)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        tokens = generate(job["prompts"], job["output_len"])
        print(json.dumps({"seconds": time.perf_counter() - start, "output_tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
