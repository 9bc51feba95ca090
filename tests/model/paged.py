"""Drive the bare decoder: several sequences, computed in steps of any shape, on blocks of any layout.

`PagedRun` is the least that a model runner must do, written plainly (loops, no persistent state) so that a test can read it.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from mini_engine.model.attention import AttentionMetadata
from mini_engine.model.decoder import Decoder

JUNK = 1e4  # in every slot before it is written; not NaN: a masked slot may be read, and 0 * NaN is NaN


class PagedRun:
    def __init__(self, model: Decoder, sequences: list[list[int]], block_size: int, seed: int) -> None:
        self.model, self.sequences, self.block_size = model, sequences, block_size
        self.computed = [0] * len(sequences)
        needed = [-(-len(s) // block_size) for s in sequences]
        order = np.random.default_rng(seed).permutation(np.arange(1, sum(needed) + 1))  # any layout; block 0 is the null block
        self.tables = [t.tolist() for t in np.split(order, np.cumsum(needed)[:-1])]
        self.kv_caches = model.new_kv_caches(sum(needed) + 1, block_size)
        for cache in self.kv_caches:
            cache.fill_(JUNK)
        self.logits: list[list[Tensor]] = [[] for _ in sequences]

    def step(self, work: Iterable[tuple[int, int]], num_padding: int = 0) -> None:
        """Compute the next n tokens of sequence i, for each (i, n): one forward."""
        work = sorted(work, key=lambda item: (item[1] != 1, -self.computed[item[0]] - item[1]))
        tokens, positions, slots = [], [], []
        for i, n in work:
            for p in range(self.computed[i], self.computed[i] + n):
                tokens.append(self.sequences[i][p])
                positions.append(p)
                slots.append(self.tables[i][p // self.block_size] * self.block_size + p % self.block_size)
        table = np.zeros((len(work), max(len(self.tables[i]) for i, _ in work)), np.int32)
        for row, (i, _) in enumerate(work):
            table[row, : len(self.tables[i])] = self.tables[i]
        metadata = AttentionMetadata.build(
            np.array(slots), [n for _, n in work], [self.computed[i] + n for i, n in work], table, self.kv_caches[0]
        )
        hidden = self.model.forward(torch.tensor(tokens), torch.tensor(positions), self.kv_caches, metadata)
        logits = self.model.compute_logits(hidden)
        for i, n in work:
            self.logits[i].append(logits[:n])
            self.computed[i] += n
            logits = logits[n:]

    def all_logits(self, i: int) -> Tensor:
        return torch.cat(self.logits[i])


def dense_logits(model: Decoder, sequence: list[int]) -> Tensor:
    """The whole sequence in one step, alone, blocks in order: no chunk, no neighbour, no gather."""
    run = PagedRun(model, [sequence], block_size=len(sequence), seed=0)
    run.step([(0, len(sequence))])
    return run.all_logits(0)
