"""What the tests of the offline LLM share besides the fixtures of conftest.py."""

from typing import Any

from mini_engine import SamplingParams

VOCAB_SIZE = 400
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


def tokens(output: Any) -> list[int]:
    return output.outputs[0].token_ids
