"""The map from prefixes to the blocks that hold their K and V. Pure Python: torch is not imported.

K and V of a token depend on all tokens before it, so a block's content is named by everything up to the block's end: a
chain of full blocks, each hashed together with its parent's hash. A hash only finds a candidate; whether the tokens are
the same is compared, all the way up, so that a collision costs a miss and never a wrong answer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["HashFunction", "Prefix", "PrefixCache", "sha256_digest"]

HashFunction = Callable[[bytes], bytes]


def sha256_digest(data: bytes) -> bytes:
    """Return the 32 bytes of SHA-256."""
    return hashlib.sha256(data).digest()


@dataclass(slots=True, eq=False)
class Prefix:
    """All tokens up to the end of one full block. Never changed; not frozen, which would cost four times as much."""

    key: bytes
    """Hash of the parent's key and this block's tokens; of the salt if there is no parent."""
    parent: Prefix | None
    token_ids: tuple[int, ...]
    """The block's own tokens."""
    salt: str
    """Requests of different salts share nothing."""

    def is_same(self, prefix: Prefix) -> bool:
        """Compare all tokens and the salt. Chains that have met before are told by identity, without walking them."""
        mine: Prefix | None = self
        theirs: Prefix | None = prefix
        while mine is not theirs:
            if mine is None or theirs is None or mine.token_ids != theirs.token_ids or mine.salt != theirs.salt:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


class PrefixCache:
    """The blocks whose K and V are computed and can be shared, by prefix.

    It knows nothing of who owns a block: the pool decides that, asks here, and reports evictions.
    """

    def __init__(self, block_size: int, hash_function: HashFunction = sha256_digest) -> None:
        self.block_size = block_size
        self._hash = hash_function
        self._blocks: dict[bytes, int] = {}
        self.prefixes: dict[int, Prefix] = {}
        """The prefix that each cached block holds, to be read only."""

    def extend(self, chain: list[Prefix], token_ids: Sequence[int], num_tokens: int, salt: str) -> None:
        """Lengthen a request's chain, in place, to the full blocks among its first `num_tokens` tokens."""
        for index in range(len(chain), num_tokens // self.block_size):
            block_tokens = tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])
            parent = chain[-1] if chain else None
            parent_key = parent.key if parent else self._hash(salt.encode())
            key = self._hash(parent_key + array("q", block_tokens).tobytes())
            chain.append(Prefix(key, parent, block_tokens, salt))

    def find(self, prefix: Prefix) -> int | None:
        """Return the block that holds exactly this prefix."""
        block = self._blocks.get(prefix.key)
        return block if block is not None and self.prefixes[block].is_same(prefix) else None

    def publish(self, block: int, prefix: Prefix) -> None:
        """Let others find a block whose K and V are computed. Whoever published first under a hash stays."""
        if prefix.key not in self._blocks and block not in self.prefixes:
            self._blocks[prefix.key] = block
            self.prefixes[block] = prefix

    def forget(self, block: int) -> None:
        """Drop a block's own entry, if it has one."""
        prefix = self.prefixes.pop(block, None)
        if prefix is not None:
            del self._blocks[prefix.key]

    def __contains__(self, block: int) -> bool:
        return block in self.prefixes

    def __len__(self) -> int:
        return len(self._blocks)
