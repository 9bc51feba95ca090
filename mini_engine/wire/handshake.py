"""Start-up messages: HELLO, INIT, READY on the handshake socket, and the ready frame on each request socket. All are maps.

    engine (DEALER, identity = rank)                     front-end (ROUTER)
      HELLO {status, local, headless}        ──────────►
                                             ◄──────────  INIT {addresses, parallel_config}
      ready frame on every addresses.inputs  ──────────►  (25 keys: the engine's limits, which become the front-end's)
      READY {status, local, headless}        ──────────►

Stands before any request.    vLLM: v1/engine/utils.py::EngineHandshakeMetadata, v1/engine/__init__.py::EngineCoreReadyResponse; WIRE §2
"""

from typing import Any

import msgspec


def engine_identity(engine_index: int) -> bytes:
    """The ZMQ routing id of an engine: its rank in two bytes, little endian."""
    return engine_index.to_bytes(2, "little")


class HandshakeStatus(msgspec.Struct, omit_defaults=True):
    """HELLO and READY, engine → front-end. Only the wire's own two words are accepted for `status`."""

    status: str
    local: bool
    headless: bool
    parallel_config_hash: str | None = None


class EngineZmqAddresses(msgspec.Struct):
    """Where the engine connects: one DEALER per input, one PUSH per output, index = client_index."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class EngineHandshakeMetadata(msgspec.Struct):
    """INIT, front-end → engine."""

    addresses: EngineZmqAddresses
    parallel_config: dict[str, object] = {}


class EngineCoreReadyResponse(msgspec.Struct, kw_only=True):
    """The ready frame: what the engine decided and the front-end has to respect. An empty frame is allowed too."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None = None
    dtype: str
    vllm_version: str
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool = False
    max_loras: int = 0
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: Any = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None
