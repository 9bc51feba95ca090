"""Block hashes: vLLM's own values, each block hashed once, and nothing else counts as the same prefix."""

from dataclasses import dataclass, field

import pytest

from mini_engine.kv_cache import block_hash
from mini_engine.kv_cache.block_hash import NONE_HASH, BlockHash, get_request_block_hasher, hash_block_tokens


@dataclass
class Prefix:
    """A request, as far as the hasher looks."""

    all_token_ids: list[int]
    cache_salt: str | None = None
    block_hashes: list[BlockHash] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def hashes(tokens: list[int], block_size: int, cache_salt: str | None = None) -> list[BlockHash]:
    return get_request_block_hasher(block_size)(Prefix(tokens, cache_salt))  # type: ignore[arg-type]


def event_int(value: BlockHash) -> int:
    """How vLLM's KV events show a hash: its low 64 bits."""
    return int.from_bytes(value, "big") & (1 << 64) - 1


def test_hashes_are_vllms() -> None:
    """Vectors taken from a running vLLM 0.32.0 (WIRE §6)."""
    assert NONE_HASH.hex() == "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"
    first, second = hashes(list(range(5, 69)), 32)
    assert first.hex() == "66fdd812a15efa4c00cdb4b1b6e22bdf81f182d0d8a5cc2a50b45e1a85936f95"
    assert [event_int(first), event_int(second)] == [5815376486845345685, 11002857776283891286]


def test_salted_hashes_are_vllms() -> None:
    assert [event_int(h) for h in hashes(list(range(5, 69)), 32, "s")] == [7050718340175918654, 3726005858928861050]


def test_extra_keys_are_tagged() -> None:
    """A bare string would let a LoRA name collide with somebody's salt."""
    tokens = list(range(16))
    assert hashes(tokens, 16, "x")[0] == hash_block_tokens(None, tokens, (("cache_salt", "x"),))
    assert hashes(tokens, 16, "x")[0] != hash_block_tokens(None, tokens, (("lora", "x"),))


@pytest.mark.parametrize("salt", [None, "s"])
def test_salt_separates_every_block_but_is_hashed_once(salt: str | None) -> None:
    chain = hashes(list(range(12)), 4, salt)
    assert chain[1] == hash_block_tokens(chain[0], [4, 5, 6, 7])
    assert not set(chain) & set(hashes(list(range(12)), 4, "other"))


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)])
def test_only_full_blocks_have_a_hash(num_tokens: int, num_hashes: int) -> None:
    assert len(hashes(list(range(num_tokens)), 4)) == num_hashes


def test_growing_request_hashes_each_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token gives the same chain as all at once, and a block is never hashed again: counted, not timed."""
    calls: list[tuple[int, ...]] = []
    original = block_hash.hash_block_tokens
    monkeypatch.setattr(block_hash, "hash_block_tokens", lambda p, t, e=None: calls.append(tuple(t)) or original(p, t, e))
    hasher, request = get_request_block_hasher(4), Prefix(list(range(10)))
    for token in range(10, 33):
        request.block_hashes += hasher(request)  # type: ignore[arg-type]
        request.all_token_ids.append(token)
    assert request.block_hashes == hashes(list(range(32)), 4)
    assert len(calls) == 8 + 8
