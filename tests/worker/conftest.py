"""Tiny models of each family, once per session, and the engine's parts around a ModelRunner without threads or sockets."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mini_engine.config import EngineConfig
from mini_engine.kv_cache.block_hash import get_request_block_hasher
from mini_engine.model.decoder import Decoder
from mini_engine.model.loader import load_model
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler.async_scheduler import AsyncScheduler
from mini_engine.scheduler.request import Request
from mini_engine.scheduler.scheduler import Scheduler
from mini_engine.step import KVCacheConfig, ModelRunnerOutput, SchedulerOutput
from mini_engine.wire.messages import EngineCoreOutput
from mini_engine.worker.model_runner import ModelRunner
from tests.model.paged import JUNK
from tests.tiny_model import FAMILIES, Family, load_reference, make_tiny_model


@dataclass
class TinyModel:
    directory: Path
    model: Decoder  #: float64: greedy tokens then differ from the reference's by a wrong index only, never by rounding
    reference: PreTrainedModel


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, TinyModel]:
    models: dict[Family, TinyModel] = {}
    for family in FAMILIES:
        directory = make_tiny_model(tmp_path_factory.mktemp(family), family)
        models[family] = TinyModel(directory, load_model(directory, torch.float64), load_reference(directory, torch.float64))
    return models


@dataclass
class Engine:
    """Scheduler and ModelRunner, stepped by hand: what EngineCore does, less everything around it."""

    model: Decoder
    num_blocks: int
    config: EngineConfig
    depth: int = 1  #: steps in flight at most; 2 is overlap
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)
    outputs: dict[str, list[EngineCoreOutput]] = field(default_factory=dict)
    steps: list[SchedulerOutput] = field(default_factory=list)
    num_preempted: int = 0

    def __post_init__(self) -> None:
        kv_cache_config = KVCacheConfig(self.num_blocks, self.config.block_size)
        scheduler_class = AsyncScheduler if self.depth > 1 else Scheduler
        self.scheduler = scheduler_class(self.config, kv_cache_config, self.model.config.max_model_len)
        self.hasher = get_request_block_hasher(self.config.block_size)
        self.runner = ModelRunner(self.model, self.config.max_num_seqs)
        self.runner.initialize_kv_cache(kv_cache_config)
        for cache in self.runner.kv_caches:
            cache.fill_(JUNK)

    def add(self, req_id: str, prompt: list[int], **params: Any) -> None:
        params = {"temperature": 0.0, "max_tokens": 8, **params}
        self.scheduler.add_request(Request(req_id, prompt, SamplingParams(**params), block_hasher=self.hasher))
        self.outputs[req_id] = []

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.steps.append(scheduled)
        self.num_preempted += len(scheduled.preempted_req_ids)
        result = self.runner.execute_model(scheduled)
        if result is None:
            result = self.runner.sample_tokens(None)
        assert result.req_ids == scheduled.sampled_req_ids
        self.in_flight.append((scheduled, result))
        if len(self.in_flight) == self.depth or not scheduled.num_scheduled_tokens:
            self.account()

    def account(self) -> None:
        for message in self.scheduler.update_from_output(*self.in_flight.popleft()).values():
            for output in message.outputs:
                self.outputs[output.request_id].append(output)

    def run(self) -> None:
        while self.scheduler.has_requests() or self.in_flight:
            self.step() if self.scheduler.has_requests() else self.account()

    def tokens(self, req_id: str) -> list[int]:
        return [token for output in self.outputs[req_id] for token in output.new_token_ids]

    def step_sizes(self) -> Iterable[int]:
        return (n for scheduled in self.steps for n in scheduled.num_scheduled_tokens.values())


@pytest.fixture(scope="session")
def make_engine(tiny_models: dict[Family, TinyModel]) -> Callable[..., Engine]:
    def make(family: Family = "llama", num_blocks: int = 64, block_size: int = 4, depth: int = 1, **config: Any) -> Engine:
        config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "check": True, **config}
        return Engine(tiny_models[family].model, num_blocks, EngineConfig(block_size=block_size, **config), depth)

    return make
