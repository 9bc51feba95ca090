"""Oracle: what transformers makes of 60 prompts on the default model in float32, greedily, with the top-two logit gap of every token.

    python tools/oracle.py              rebuild tests/data/oracle/smollm2.json (a few minutes; one JSON line on stdout)

The file is committed, so that the tests need no transformers run. The gap says how sure a token is: rounding may turn one with a
gap below 1e-4 into the other (DESIGN §3, Equality), and nothing else. Short prompts run in batches, padded on the left; EOS is ignored.
Prompts: English, chat, Chinese and other scripts, emoji, code, numbers; 1 to 1,500 tokens; some exactly at block edges (16), some
with a long beginning in common, so that chunking, preemption and the prefix cache have something to get wrong.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from mini_engine.model.default_model import describe, prepare

OUTPUT = Path(__file__).parent.parent / "tests" / "data" / "oracle" / "smollm2.json"

SHORT = [
    "A", "The", "\n", "1", "你", "🙂", "def", "Once upon a time", "The capital of France is", "To be, or not to be,",
    "In 1969, the first people", "My favourite recipe for bread:\n1.", "Dear Sir or Madam,\n", "Q: What is 7 times 8?\nA:",
    "2, 4, 8, 16, 32,", "3.14159265358979", "0x7fff, 0b1010, 1e-9,", "The chemical symbol for gold is",
    "中国的首都是", "今天天气很好，我们去公园", "问：水的化学式是什么？\n答：", "从前有一座山，山里有一座庙，", "人工智能（AI）是",
    "東京は日本の", "Привет, как дела?", "مرحبا بالعالم", "La vie est belle et", "Der Rhein fließt durch", "नमस्ते दुनिया",
    "🎉🎂🎈 Happy birthday to", "I ❤️ 🍕 and 👩‍👩‍👧 because", "👍🏽👍🏿🙏 thank you", "🇩🇪🇫🇷🇯🇵 are the flags of",
    "def fibonacci(n):\n    ", "import numpy as np\n\nx = np.", "for (int i = 0; i < n; i++) {\n", "SELECT name, count(*) FROM users",
    "#include <stdio.h>\n\nint main(void) {\n", '{"name": "Alice", "age": 30, "city":', "<html>\n<head>\n<title>",
    "fn main() {\n    println!(",
]  # fmt: skip

QUESTIONS = [
    "What is the capital of France?", "Write a haiku about the sea.", "Explain photosynthesis in one sentence.",
    "List three prime numbers above 50.", "Translate 'good morning' into Spanish.", "用一句话介绍你自己。", "Tell me a joke about 🐱.",
]  # fmt: skip

ABOUT_THE_LOG = [
    "Which lamp was lit on day 3?", "Who kept the log?", "How many days does it cover?", "Write the next entry.",
    "Summarise it in five words.",
]  # fmt: skip

EXACT_LENGTHS = [15, 16, 17, 256, 500, 1024, 1500]  # tokens


def log(days: int) -> str:
    """A text of any length that says something new on every line."""
    colours, places = ("red", "green", "white", "amber", "blue"), ("harbour", "cape", "reef", "island", "bay", "pier", "point")
    return "".join(
        f"Day {i}: the {colours[i % 5]} lamp at the {places[i % 7]} was lit at {i * 37 % 24:02}:{i * 11 % 60:02}, wind {i * 13 % 90} km/h\n"
        for i in range(1, days + 1)
    )


def chat(question: str) -> str:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def prompts(tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """(token ids, how many new tokens): 60 of them."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    long = ids(log(80))
    made = [ids(text) for text in SHORT]
    made += [ids(chat(q)) for q in QUESTIONS]
    made += [ids(chat(f"The log:\n{log(8)}\n{q}")) for q in ABOUT_THE_LOG]
    made += [long[:n] for n in EXACT_LENGTHS]
    assert len(made) == 60 and len(long) >= max(EXACT_LENGTHS) and min(map(len, made)) == 1
    return [(p, 64 if len(p) < 200 else 32 if len(p) < 700 else 16) for p in made]


@torch.inference_mode()
def generate(model: transformers.PreTrainedModel, batch: list[list[int]], num_tokens: int) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of each prompt and, for each token, its logit minus the next best one's. Prompts are padded on the left."""
    width = max(map(len, batch))
    inputs = torch.tensor([[0] * (width - len(p)) + p for p in batch])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = transformers.DynamicCache()
    steps = []
    for _ in range(num_tokens):
        logits = model(inputs, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1).logits
        steps.append(logits[:, -1].topk(2))
        inputs = steps[-1].indices[:, :1]
        mask = torch.cat((mask, torch.ones_like(inputs)), 1)
        positions = positions[:, -1:] + 1
    tokens = torch.stack([s.indices[:, 0] for s in steps], 1)
    gaps = torch.stack([s.values[:, 0] - s.values[:, 1] for s in steps], 1)
    return [(t, [float(f"{gap:.3g}") for gap in g]) for t, g in zip(tokens.tolist(), gaps.tolist(), strict=True)]


def batches(made: list[tuple[list[int], int]]) -> list[list[int]]:
    """Indices of prompts that run together: short ones of like length by twenties, long ones alone."""
    order = sorted(range(len(made)), key=lambda i: len(made[i][0]))
    short = [i for i in order if len(made[i][0]) < 200]
    return [short[i : i + 20] for i in range(0, len(short), 20)] + [[i] for i in order if i not in short]


def main() -> None:
    directory = prepare()
    source = describe().package_file
    assert source is not None, "the package of the default model is needed: the file records which weights it belongs to"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    started, made = time.perf_counter(), prompts(tokenizer)
    cases: list[dict[str, list[Any]]] = [{} for _ in made]
    for group in batches(made):
        results = generate(model, [made[i][0] for i in group], made[group[0]][1])
        for i, (tokens, gaps) in zip(group, results, strict=True):
            cases[i] = {"prompt_token_ids": made[i][0], "token_ids": tokens, "gaps": gaps}
            print(f"{i:2} {len(made[i][0]):5} tokens {tokenizer.decode(tokens)[:60]!r} smallest gap {min(gaps):.2g}", file=sys.stderr)
    header = {
        "source": source.name,
        "source_bytes": source.stat().st_size,
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32"},
        "rebuild": "python tools/oracle.py",
    }
    rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    temporary = OUTPUT.with_suffix(".tmp")
    temporary.write_text(f'{json.dumps(header)[:-1]}, "cases": [\n{rows}\n]}}\n', encoding="utf-8")
    os.replace(temporary, OUTPUT)
    all_gaps = sorted(gap for case in cases for gap in case["gaps"])
    summary = {
        "cases": len(cases),
        "prompt_tokens": sum(len(c["prompt_token_ids"]) for c in cases),
        "tokens": len(all_gaps),
        "below_1e-4": sum(g < 1e-4 for g in all_gaps),
        "smallest_gaps": all_gaps[:3],
        "seconds": round(time.perf_counter() - started),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
