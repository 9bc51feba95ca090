"""Block pool: the order of reuse is vLLM's, and every sequence of operations agrees with a plain model."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mini_engine.kv_cache.block_pool import BlockPool, KVCacheBlock


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def free_ids(pool: BlockPool) -> list[int]:
    return ids(pool.free_block_queue.get_all_free_blocks())


def take(pool: BlockPool, *hashes: bytes | None) -> list[KVCacheBlock]:
    """One new block per hash, published under it unless it is None."""
    blocks = pool.get_new_blocks(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        if block_hash is not None:
            pool.cache_full_blocks([block], [block_hash])
    return blocks


def test_new_pool_hands_out_by_id_and_never_the_null_block() -> None:
    pool = BlockPool(5, enable_caching=True)
    assert pool.null_block.block_id == 0 and pool.get_usage() == 0.0
    assert ids(pool.get_new_blocks(4)) == [1, 2, 3, 4]
    assert pool.get_num_free_blocks() == 0 and pool.get_usage() == 1.0
    pool.check({1: 1, 2: 1, 3: 1, 4: 1})


def test_free_order() -> None:
    """Unhashed blocks to the front, last freed first; hashed ones to the end, a request's tail before its head."""
    pool = BlockPool(9, enable_caching=True)
    first = take(pool, b"a0", b"a1", None)  # 1 2 3
    second = take(pool, b"b0", None)  # 4 5
    pool.free_blocks(reversed(first))
    assert free_ids(pool) == [3, 6, 7, 8, 2, 1]
    pool.free_blocks(reversed(second))
    assert free_ids(pool) == [5, 3, 6, 7, 8, 2, 1, 4]


def test_eviction_order() -> None:
    """Handing out is eviction: the least recently freed prefix goes first, its deepest block before its first."""
    pool = BlockPool(5, enable_caching=True)
    pool.free_blocks(reversed(take(pool, b"a0", b"a1")))
    pool.free_blocks(reversed(take(pool, b"b0", b"b1")))
    left = []
    for _ in range(4):
        pool.get_new_blocks(1)
        left.append([h for h in (b"a0", b"a1", b"b0", b"b1") if pool.get_cached_block(h)])
    assert left == [[b"a0", b"b0", b"b1"], [b"b0", b"b1"], [b"b0"], []]
    assert pool.statistics().num_evictions == 4


def test_touch_takes_a_free_block_out_of_the_middle() -> None:
    pool = BlockPool(6, enable_caching=True)
    pool.free_blocks(reversed(take(pool, b"a0", b"a1", b"a2")))
    hit = pool.get_cached_block(b"a1")
    assert hit is not None and free_ids(pool) == [4, 5, 3, 2, 1]
    pool.touch([hit])
    assert free_ids(pool) == [4, 5, 3, 1]
    assert ids(pool.get_new_blocks(4)) == [4, 5, 3, 1] and pool.get_cached_block(b"a1") is hit


def test_shared_block_is_freed_by_its_last_owner() -> None:
    pool = BlockPool(3, enable_caching=True)
    block = take(pool, b"a0")[0]
    pool.touch([block])
    pool.free_blocks([block])
    assert free_ids(pool) == [2] and block.ref_cnt == 1
    pool.free_blocks([block])
    assert free_ids(pool) == [2, 1]


def test_same_prefix_twice_keeps_both_blocks() -> None:
    """No merging: tables are append-only. The first published is the hit until it is evicted, then the other."""
    pool = BlockPool(4, enable_caching=True)
    first, second = take(pool, b"a0", b"a0")
    assert pool.get_cached_block(b"a0") is first and pool.statistics().num_cached_blocks == 2
    pool.free_blocks([first])
    pool.get_new_blocks(2)
    assert pool.get_cached_block(b"a0") is second


def test_reset_needs_an_idle_pool() -> None:
    pool = BlockPool(4, enable_caching=True)
    blocks = take(pool, b"a0")
    assert not pool.reset_prefix_cache() and pool.get_cached_block(b"a0") is blocks[0]
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache() and pool.get_cached_block(b"a0") is None and blocks[0].block_hash is None


def test_statistics_remember_the_peak() -> None:
    pool = BlockPool(8, enable_caching=True)
    pool.free_blocks(take(pool, b"a0", b"a1", None))
    pool.touch([pool.blocks[1]])
    stats = pool.statistics()
    assert (stats.num_gpu_blocks, stats.num_free_blocks, stats.num_cached_blocks, stats.peak_used_blocks) == (8, 6, 2, 3)


@pytest.mark.parametrize("damage", ["ref_cnt", "free twice", "lost", "stale hash", "unmapped hash", "null"])
def test_check_finds(damage: str) -> None:
    """The self-check is no stub: each kind of damage is an AssertionError."""
    pool = BlockPool(6, enable_caching=True)
    blocks = take(pool, b"a0", None)
    owners = {1: 1, 2: 1}
    pool.check(owners)
    if damage == "ref_cnt":
        blocks[0].ref_cnt += 1
    elif damage == "free twice":
        pool.free_block_queue.append_n([blocks[1]])
    elif damage == "lost":
        pool.free_block_queue.popleft_n(1)
    elif damage == "stale hash":
        blocks[0].block_hash = None
    elif damage == "unmapped hash":
        blocks[1].block_hash = b"b0"
    else:
        owners = {0: 1, 1: 1}
    with pytest.raises(AssertionError):
        pool.check(owners)


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: a list of free ids, an owner count and a hash per id, and for each hash its ids in order of publication."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, enable_caching=True)
        self.free = list(range(1, 8))
        self.hash: dict[int, bytes] = {}
        self.cached: dict[bytes, list[int]] = {}
        self.tables: list[list[int]] = []

    def forget(self, block_id: int) -> None:
        if block_hash := self.hash.pop(block_id, None):
            self.cached[block_hash].remove(block_id)

    def owners(self, block_id: int) -> int:
        return sum(table.count(block_id) for table in self.tables)

    @rule(n=st.integers(0, 7))
    def allocate(self, n: int) -> None:
        n = min(n, len(self.free))
        taken, self.free = self.free[:n], self.free[n:]
        assert ids(self.pool.get_new_blocks(n)) == taken
        for block_id in taken:
            self.forget(block_id)
        self.tables.append(taken)

    @rule(data=st.data(), block_hash=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, data: st.DataObject, block_hash: bytes) -> None:
        unhashed = sorted({i for table in self.tables for i in table} - self.hash.keys())
        if unhashed:
            block_id = data.draw(st.sampled_from(unhashed))
            self.pool.cache_full_blocks([self.pool.blocks[block_id]], [block_hash])
            self.hash[block_id] = block_hash
            self.cached.setdefault(block_hash, []).append(block_id)

    @rule(block_hash=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def hit(self, block_hash: bytes) -> None:
        expected = self.cached.get(block_hash)
        block = self.pool.get_cached_block(block_hash)
        assert (block.block_id if block else None) == (expected[0] if expected else None)
        if block is not None:
            self.pool.touch([block])
            if block.block_id in self.free:
                self.free.remove(block.block_id)
            self.tables.append([block.block_id])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free_table(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free_blocks(self.pool.blocks[i] for i in reversed(table))
        gone = [i for i in reversed(table) if self.owners(i) == 0]
        self.free = [i for i in gone if i not in self.hash] + self.free + [i for i in gone if i in self.hash]

    @precondition(lambda self: self.hash)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.hash)))
        assert self.pool.uncache_block(self.pool.blocks[block_id])
        assert not self.pool.uncache_block(self.pool.blocks[block_id])
        self.forget(block_id)

    @rule()
    def reset(self) -> None:
        idle = len(self.free) == 7
        assert self.pool.reset_prefix_cache() == idle
        if idle:
            self.hash, self.cached = {}, {}

    @invariant()
    def agrees(self) -> None:
        assert free_ids(self.pool) == self.free
        assert {b.block_id: b.block_hash for b in self.pool.blocks if b.block_hash} == self.hash
        self.pool.check({i: n for i in range(8) if (n := self.owners(i))})


TestPoolAgainstModel = PoolAgainstModel.TestCase
