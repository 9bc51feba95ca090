"""Logprobs: how likely the chosen token was, how many were as likely or more, and which were the most likely.

Promises  computed from the model's own logits, before processors, temperature and filters (vLLM's raw_logprobs), in float32 at
          least. Column 0 is the chosen token; rank 1 is the most likely. Only the rows that asked are worked on.

At form 7 of a request.    vLLM: v1/sample/sampler.py::Sampler.gather_logprobs, v1/sample/ops/logprobs.py
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_engine.wire.messages import LogprobsLists, LogprobsTensors
from mini_engine.wire.messages import Tensor as WireTensor


def gather_logprobs(logits: Tensor, num_logprobs: int, token_ids: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logits [n, vocab], token_ids [n] int64 → ids [n, k + 1] int32, logprobs [n, k + 1] float32, ranks [n] int64."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    chosen = logits.gather(-1, token_ids[:, None])
    indices = logits.topk(num_logprobs, dim=-1).indices
    ids = torch.cat((token_ids[:, None], indices), 1)
    # not x - logsumexp(x), which would write no [n, vocab]: torch splits the sum of a single row over threads, that of several not, and a
    # row alone would differ from a row in a crowd
    logprobs = logits.log_softmax(-1).gather(-1, ids)
    ranks = (logits >= chosen).sum(-1)
    return ids.int().cpu().numpy(), logprobs.float().cpu().numpy(), ranks.cpu().numpy()


def sample_logprobs(raw_logits: Tensor, num_logprobs: int, rows: Sequence[int], sampled: Tensor) -> LogprobsLists:
    """LogprobsLists of a batch: raw_logits [len(rows), vocab] are those of `rows`, sampled [n] is the whole batch's.

    A row that did not ask holds zeros; every row has the columns of the row that asked for most. The reader takes what it asked for."""
    ids, logprobs, ranks = gather_logprobs(raw_logits, num_logprobs, sampled if len(rows) == len(sampled) else sampled[list(rows)])
    if len(rows) == len(sampled):
        return LogprobsLists(ids, logprobs, ranks)
    batch = LogprobsLists(
        np.zeros((len(sampled), num_logprobs + 1), np.int32),
        np.zeros((len(sampled), num_logprobs + 1), np.float32),
        np.zeros(len(sampled), np.int64),
    )
    batch.logprob_token_ids[rows], batch.logprobs[rows], batch.sampled_token_ranks[rows] = ids, logprobs, ranks
    return batch


def prompt_logprobs(logits: Tensor, num_logprobs: int, next_token_ids: Sequence[int]) -> LogprobsTensors:
    """Prompt logprobs of one chunk: logits [m, vocab] at m prompt positions, and the m prompt tokens that follow them.

    num_logprobs -1 is the whole vocabulary. The caller bounds m (m * vocab floats are alive at once) and joins chunks."""
    vocab = logits.shape[-1]
    k = vocab if num_logprobs == -1 else min(num_logprobs, vocab)
    token_ids = torch.as_tensor(next_token_ids, dtype=torch.int64, device=logits.device)
    ids, logprobs, ranks = gather_logprobs(logits, k, token_ids)
    return LogprobsTensors(ids.view(WireTensor), logprobs.view(WireTensor), ranks.astype(np.int32).view(WireTensor))


def join_prompt_logprobs(chunks: Sequence[LogprobsTensors]) -> LogprobsTensors:
    """The chunks of one prompt, in order, as one: what ModelRunnerOutput.prompt_logprobs_dict holds. At least one chunk."""
    columns = list(zip(*((c.logprob_token_ids, c.logprobs, c.selected_token_ranks) for c in chunks), strict=True))
    ids, logprobs, ranks = (np.concatenate(column).view(WireTensor) for column in columns)
    return LogprobsTensors(ids, logprobs, ranks)
