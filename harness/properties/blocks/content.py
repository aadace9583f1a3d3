"""The content oracle: for every physical slot, the token prefix whose K and V were written there last.

K and V of a position depend on all tokens up to it, so that a slot is right for a request exactly when it was written
for an equal prefix. Prefixes are numbered: comparing two is comparing two integers.
"""

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["ContentOracle"]


class ContentOracle:
    """What the slots of a cache would hold, had there been one."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[int | str, int], int] = {}
        self._prefixes: list[tuple[int | str, int]] = []
        self._content: dict[tuple[int, int], int] = {}

    def extend(self, names: list[int], token_ids: Sequence[int], salt: str) -> None:
        """Lengthen a request's list of prefix numbers, in place, to one for each of its tokens.

        Two numbers are equal exactly when the salt and all tokens up to there are.
        """
        parent: int | str = names[-1] if names else salt
        for token_id in token_ids[len(names) :]:
            key = (parent, token_id)
            if key not in self._numbers:
                self._numbers[key] = len(self._prefixes)
                self._prefixes.append(key)
            parent = self._numbers[key]
            names.append(parent)

    def describe(self, name: int | None) -> str:
        """Spell a prefix out."""
        if name is None:
            return "nothing"
        salt, tokens = self._spell(name)
        return f"{list(tokens)}" + (f" of salt {salt!r}" if salt else "")

    def tokens_in(self, block: int) -> tuple[int, ...] | None:
        """Return all tokens up to the end of a block; None unless its slots hold one prefix in order."""
        names = [self._content.get((block, offset)) for offset in range(self.block_size)]
        last = names[-1]
        for name, following in pairwise(names):
            if name is None or following is None or self._prefixes[following][0] != name:
                return None
        return None if last is None else self._spell(last)[1]

    def write(self, table: Sequence[int], position: int, name: int) -> None:
        """Write K and V of one position through a block table."""
        self._content[table[position // self.block_size], position % self.block_size] = name

    def read(self, table: Sequence[int], position: int) -> int | None:
        """Return the prefix that a position's slot holds; None where nothing was ever written."""
        return self._content.get((table[position // self.block_size], position % self.block_size))

    def copy(self, source: int, target: int) -> None:
        """Copy all slots of a block."""
        for offset in range(self.block_size):
            name = self._content.get((source, offset))
            if name is None:
                self._content.pop((target, offset), None)
            else:
                self._content[target, offset] = name

    def first_wrong(self, table: Sequence[int], names: Sequence[int]) -> int | None:
        """Return the first position whose slot does not hold its own prefix, None where all do."""
        return next((p for p, name in enumerate(names) if self.read(table, p) != name), None)

    def _spell(self, name: int) -> tuple[str, tuple[int, ...]]:
        tokens: list[int] = []
        parent: int | str = name
        while isinstance(parent, int):
            parent, token_id = self._prefixes[parent]
            tokens.append(token_id)
        return parent, tuple(reversed(tokens))
