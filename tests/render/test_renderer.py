"""The render pool: off the loop, on its own threads, refusing what cannot fit before it costs anything."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from mini_engine.exceptions import VLLMValidationError
from mini_engine.render.renderer import Renderer
from tests.text.tiny_tokenizers import byte_level

pytestmark = pytest.mark.anyio

FILES = SimpleNamespace(special_tokens={}, chat_templates={"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})


class SlowTokenizer:
    """Encodes when told to; says where, and what it has seen."""

    longest_token_chars = 3

    def __init__(self):
        self.go = threading.Event()
        self.started = threading.Event()
        self.seen, self.threads = [], set()

    def encode(self, text, add_special_tokens=True):
        self.started.set()
        assert self.go.wait(10)
        self.seen.append(text)
        self.threads.add(threading.current_thread().name)
        return [len(text)]


@pytest.fixture
def slow():
    tokenizer = SlowTokenizer()
    renderer = Renderer(FILES, tokenizer, max_model_len=10)
    yield tokenizer, renderer
    tokenizer.go.set()
    renderer.close()


async def test_the_loop_runs_while_a_prompt_is_tokenized(slow):
    tokenizer, renderer = slow
    task = asyncio.create_task(renderer.render_chat([{"role": "user", "content": "hello"}]))
    assert await asyncio.to_thread(tokenizer.started.wait, 10)
    assert not task.done()  # it waits for us: the loop is free
    tokenizer.go.set()
    assert await task == ("hello", [5])
    assert all(name.startswith("render") for name in tokenizer.threads)


async def test_what_cannot_fit_is_refused_untokenized_even_when_the_pool_is_busy(slow):
    tokenizer, renderer = slow
    busy = asyncio.create_task(renderer.tokenize_prompt("x"))
    assert await asyncio.to_thread(tokenizer.started.wait, 10)
    with pytest.raises(VLLMValidationError, match=r"31 characters; 10 tokens .* of at most 3 characters hold 30"):
        await renderer.tokenize_prompt("y" * 31)
    with pytest.raises(VLLMValidationError, match="31 characters"):
        renderer.render_chat_sync([{"role": "user", "content": "y" * 31}])
    tokenizer.go.set()
    assert await busy == [1]
    assert await renderer.tokenize_prompt("y" * 30) == [30]
    assert tokenizer.seen == ["x", "y" * 30]


async def test_a_cancelled_prompt_that_has_not_started_costs_nothing(slow):
    tokenizer, renderer = slow
    busy = asyncio.create_task(renderer.tokenize_prompt("first"))
    assert await asyncio.to_thread(tokenizer.started.wait, 10)
    waiting = asyncio.create_task(renderer.tokenize_prompt("second"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    tokenizer.go.set()
    await busy
    renderer.close()
    assert tokenizer.seen == ["first"]


async def test_close_does_not_wait_for_what_may_never_end(slow):
    tokenizer, renderer = slow
    stuck, queued = (asyncio.create_task(renderer.tokenize_prompt(text)) for text in ("stuck", "queued"))
    assert await asyncio.to_thread(tokenizer.started.wait, 10)
    renderer.close()
    assert not stuck.done()
    with pytest.raises(asyncio.CancelledError):
        await queued
    tokenizer.go.set()
    await stuck
    assert tokenizer.seen == ["stuck"]


async def test_both_ways_give_the_same():
    renderer = Renderer(FILES, byte_level(), max_model_len=1000, num_workers=2)
    chat = [{"role": "user", "content": "the quick brown fox"}]
    assert (
        await renderer.render_chat(chat)
        == renderer.render_chat_sync(chat)
        == ("the quick brown fox", byte_level().encode("the quick brown fox"))
    )
    many = await asyncio.gather(*(renderer.tokenize_prompt(f"fox {i}") for i in range(50)))
    assert many == [renderer.tokenize_prompt_sync(f"fox {i}") for i in range(50)]
    renderer.close()
    renderer.close()
