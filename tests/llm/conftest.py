"""A model directory without weights, and an LLM over it on the mock device."""

import json
from collections.abc import Iterator

import pytest

from mini_engine import LLM
from tests.llm.offline import TEMPLATE, VOCAB_SIZE
from tests.text.tiny_tokenizers import byte_level


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "max_position_embeddings": 128, "eos_token_id": 0}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.6, "max_new_tokens": 3}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    byte_level().backend.save(str(directory / "tokenizer.json"))
    return str(directory)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, executor="mock", num_gpu_blocks_override=12) as llm:
        yield llm
