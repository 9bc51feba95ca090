"""One row of a batch, as the sampler sees it: parameters, where the request stands, what it has seen so far.

Owner     the model runner makes one per request that gets a token this step, and may keep it: it moves `position` on and grows
          `output_token_ids` in place. A resumed request gets a new row; nothing here has to survive a preemption.
Promises  a token depends on its own row and logits only; `seed_key` and `position` are all that chance depends on.

Stands between forms 6 and 7 of a request.    vLLM: v1/worker/gpu_input_batch.py (columns there, rows here)
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_engine.sampling.penalties import TokenCounts
from mini_engine.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplingRow:
    """What the next token of one request is chosen by."""

    params: SamplingParams
    seed_key: int  #: request_seed()
    position: int  #: index of the output token about to be sampled: 0 is the first after the prompt
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  #: position entries
    counts: TokenCounts | None = field(default=None, repr=False)  #: the penalties' memory, grown with output_token_ids


def request_seed(params: SamplingParams, engine_seed: int, request_id: str) -> int:
    """64-bit key of a request's random numbers: its own seed, or one made of the engine's seed and the request id."""
    if params.seed is not None:
        return params.seed & (2**64 - 1)
    return int.from_bytes(hashlib.blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest(), "little")
