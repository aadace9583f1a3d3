"""The content oracle: for every physical slot, the token prefix whose K and V were written there last.

K and V of a position depend on all tokens up to it, so that a slot is right for a request exactly when it was written
for an equal prefix. Prefixes are numbered: comparing two is comparing two integers. Groups of layers with tables of
their own take blocks from one pool and write other K and V, so that what a slot holds is a group and a prefix.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

Content = tuple[int, int]
"""A group of layers, and the number of a prefix."""


class ContentOracle:
    """The content that the slots of a cache would have."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[int | str, int], int] = {}
        self._prefixes: list[tuple[int | str, int]] = []
        self._content: dict[tuple[Hashable, int], Content] = {}

    def extend(self, prefixes: list[int], token_ids: Sequence[int], salt: str) -> None:
        """Lengthen a request's list of prefix numbers, in place, to one for each of its tokens.

        Two numbers are equal exactly when the salt and all tokens up to there are.
        """
        parent: int | str = prefixes[-1] if prefixes else salt
        for token_id in token_ids[len(prefixes) :]:
            key = (parent, token_id)
            if key not in self._numbers:
                self._numbers[key] = len(self._prefixes)
                self._prefixes.append(key)
            parent = self._numbers[key]
            prefixes.append(parent)

    def describe(self, content: Content | None) -> str:
        """Spell out what a slot holds."""
        if content is None:
            return "nothing"
        group, prefix = content
        salt, tokens = self.spell(prefix)
        of_group = f" in group {group}" if group else ""
        return f"{list(tokens)}" + (f" of salt {salt!r}" if salt else "") + of_group

    def tokens_in(self, block: int) -> tuple[int, ...] | None:
        """Return all tokens up to the end of a block; None unless its slots hold one prefix in order."""
        contents = [self._content.get((block, offset)) for offset in range(self.block_size)]
        for content, following in pairwise(contents):
            if content is None or following is None or content[0] != following[0]:
                return None
            if self._prefixes[following[1]][0] != content[1]:
                return None
        last = contents[-1]
        return None if last is None else self.spell(last[1])[1]

    def last_prefix_in(self, block: int) -> int | None:
        """Return the prefix in the last slot of a block; None if nothing was written."""
        content = self._content.get((block, self.block_size - 1))
        return None if content is None else content[1]

    def write(self, block: int, offset: int, content: Content) -> None:
        """Write K and V of one position."""
        self._content[block, offset] = content

    def read(self, table: Sequence[int], position: int) -> Content | None:
        """Return what a position's slot holds; None if nothing was ever written."""
        return self._content.get((table[position // self.block_size], position % self.block_size))

    def copy(self, source: Hashable, target: Hashable) -> None:
        """Copy all slots of a block."""
        for offset in range(self.block_size):
            content = self._content.get((source, offset))
            if content is None:
                self._content.pop((target, offset), None)
            else:
                self._content[target, offset] = content

    def first_wrong(
        self, table: Sequence[int], prefixes: Sequence[int], group: int, positions: Iterable[int]
    ) -> int | None:
        """Return the first of some positions whose slot does not hold its own prefix, None if all do."""
        size, content = self.block_size, self._content
        for position in positions:
            slot = (table[position // size], position % size)
            if content.get(slot) != (group, prefixes[position]):
                return position
        return None

    def spell(self, prefix: int) -> tuple[str, tuple[int, ...]]:
        """Return the salt of a numbered prefix, and its tokens."""
        tokens: list[int] = []
        parent: int | str = prefix
        while isinstance(parent, int):
            parent, token_id = self._prefixes[parent]
            tokens.append(token_id)
        return parent, tuple(reversed(tokens))
