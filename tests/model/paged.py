"""Drive the bare decoder: several sequences, computed in steps of any shape, on blocks of any layout.

`PagedRun` is the least that a model runner must do, written plainly (loops, no persistent state) so that a test can read it.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from mini_engine.model.cpu_attention import CPUAttentionBackend
from mini_engine.model.decoder import Decoder

JUNK = 1e4  # in every slot before it is written; not NaN: torch's attention reads masked slots, and 0 * NaN is NaN


class PagedRun:
    def __init__(self, model: Decoder, sequences: list[list[int]], block_size: int, seed: int) -> None:
        self.model, self.sequences, self.block_size = model, sequences, block_size
        self.computed = [0] * len(sequences)
        needed = [-(-len(s) // block_size) for s in sequences]
        order = np.random.default_rng(seed).permutation(np.arange(1, sum(needed) + 1))  # any layout; block 0 is the null block
        self.tables = [t.tolist() for t in np.split(order, np.cumsum(needed)[:-1])]
        self.attention = model.attention_backend(block_size)
        self.kv_caches = self.attention.new_kv_caches(sum(needed) + 1)
        for cache in self.kv_caches:
            cache.fill_(float("nan") if isinstance(self.attention, CPUAttentionBackend) else JUNK)
        self.logits: list[list[Tensor]] = [[] for _ in sequences]

    def step(self, work: Iterable[tuple[int, int]]) -> None:
        """Compute the next n tokens of sequence i, for each (i, n): one forward."""
        work = sorted(work, key=lambda item: (item[1] != 1, -self.computed[item[0]] - item[1]))
        positions = [p for i, n in work for p in range(self.computed[i], self.computed[i] + n)]
        tokens = [self.sequences[i][p] for i, n in work for p in range(self.computed[i], self.computed[i] + n)]
        table = np.zeros((len(self.tables), max(map(len, self.tables))), np.int32)
        for row, blocks in enumerate(self.tables):
            table[row, : len(blocks)] = blocks
        rows, query_lens = np.array([i for i, _ in work]), np.array([n for _, n in work])
        seq_lens = np.array([self.computed[i] + n for i, n in work])
        metadata = self.attention.build(rows, query_lens, seq_lens, np.array(positions), table)
        hidden = self.model.forward(torch.tensor(tokens), torch.tensor(positions), self.kv_caches, metadata)
        logits = self.model.compute_logits(hidden)
        for i, n in work:
            self.logits[i].append(logits[:n])
            self.computed[i] += n
            logits = logits[n:]

    def all_logits(self, i: int) -> Tensor:
        return torch.cat(self.logits[i])


def dense_logits(model: Decoder, sequence: list[int]) -> Tensor:
    """The whole sequence in one step, alone, in one block: no chunk, no neighbour, no gather."""
    run = PagedRun(model, [sequence], block_size=-(-len(sequence) // 16) * 16, seed=0)
    run.step([(0, len(sequence))])
    return run.all_logits(0)
