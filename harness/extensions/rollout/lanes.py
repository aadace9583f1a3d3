"""Rows as sequences for a forward: alone, without or with a first token, or one behind the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.extensions.rollout.format import Rollout
from harness.extensions.rollout.setting import Setting


class Places:
    """All tokens of all rows, one row after the other, and which of them have a value."""

    def __init__(self, rows: Sequence[Rollout]) -> None:
        self.rows = rows
        lengths = [len(row.tokens) for row in rows]
        self.begins = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
        """Number of each row's first token."""
        self.num_tokens = sum(lengths)

    @cached_property
    def compared(self) -> torch.Tensor:
        """[compared] int64: numbers of the tokens that are compared."""
        mask = [counts for row in self.rows for counts in row.mask]
        return torch.tensor(mask).nonzero()[:, 0]

    @cached_property
    def row_of(self) -> torch.Tensor:
        """[tokens] int64: index of each token's row."""
        return torch.repeat_interleave(torch.tensor([len(row.tokens) for row in self.rows]))

    def column(self, side: str) -> torch.Tensor:
        """Return the recorded log probabilities, [compared] float64."""
        values = [value for row in self.rows for value in getattr(row, side) or [None] * len(row.tokens)]
        return torch.tensor([values[at] for at in self.compared.tolist()], dtype=torch.float64)

    def is_end(self, shift: int) -> torch.Tensor:
        """Return for which tokens no token of their response stands so many places before them, [compared] bool."""
        spans = [(at + row.num_prompt, at + len(row.tokens)) for at, row in zip(self.begins, self.rows, strict=True)]
        firsts, ends = torch.tensor(spans)[self.row_of[self.compared]].T
        boundary = self.compared - shift
        return torch.logical_or(boundary < firsts, boundary >= ends)

    def put(self, kept: dict[str, torch.Tensor], source: str, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep some tokens' rows of a source, [tokens, ...]; what is not known is NaN, or -1 in whole numbers."""
        if source not in kept:
            unknown = torch.nan if rows.is_floating_point() else -1
            kept[source] = torch.full((self.num_tokens, *rows.shape[1:]), unknown, dtype=rows.dtype)
        kept[source][numbers] = rows.cpu()

    def place(self, at: int) -> tuple[Rollout, int]:
        """Return the row of a token, and its position there."""
        row = int(self.row_of[at])
        return self.rows[row], at - self.begins[row]


@dataclass(frozen=True, slots=True)
class Lane:
    """One sequence of a forward."""

    token_ids: tuple[int, ...]
    numbers: tuple[int, ...]
    """For each token its number in `Places`; -1 for one that no row has."""
    decoded: tuple[bool, ...]
    """Whether a token's row of the forward ran after the prompt: of a response, but its first."""
    positions: tuple[int, ...] | None = None
    """Position of each token; None from 0 on."""


@dataclass(frozen=True, slots=True)
class LaneBatch:
    """Lanes side by side, the shorter ones padded after their end, or before their beginning."""

    ids: torch.Tensor
    """[lanes, tokens] int64."""
    numbers: torch.Tensor
    """[lanes * tokens] int64: numbers in `Places`; -1 for padding."""
    decoded: torch.Tensor
    """[lanes, tokens] bool."""
    is_there: torch.Tensor
    """[lanes, tokens] bool: what is no padding."""
    given_positions: torch.Tensor | None
    """[lanes, tokens] int64, of lanes that have positions of their own."""

    @classmethod
    def of(cls, lanes: Sequence[Lane], *, is_left: bool = False) -> "LaneBatch":
        """Put lanes side by side."""
        longest = max(len(lane.token_ids) for lane in lanes)

        def table(columns: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
            rest = [[fill] * (longest - len(column)) for column in columns]
            lines = [[*pad, *column] if is_left else [*column, *pad] for pad, column in zip(rest, columns, strict=True)]
            return torch.tensor(lines)

        return cls(
            ids=table([lane.token_ids for lane in lanes], 0),
            numbers=table([lane.numbers for lane in lanes], -1).flatten(),
            decoded=table([lane.decoded for lane in lanes], 0).bool(),
            is_there=table([[1] * len(lane.token_ids) for lane in lanes], 0).bool(),
            given_positions=table([lane.positions for lane in lanes if lane.positions is not None], 0)
            if all(lane.positions is not None for lane in lanes)
            else None,
        )

    @property
    def position_ids(self) -> torch.Tensor:
        """[lanes, tokens] int64, from 0 at the first token of each lane."""
        return (self.is_there.cumsum(dim=1) - 1).clamp(min=0)


def make_lanes(places: Places, setting: Setting, max_positions: int | None) -> list[Lane]:
    """Return the rows as the setting has them."""
    lanes = []
    for begin, row in zip(places.begins, places.rows, strict=True):
        numbers = tuple(range(begin, begin + len(row.tokens)))
        decoded = tuple(at >= row.num_prompt for at in range(len(row.tokens)))
        lane = Lane(row.tokens, numbers, decoded)
        if setting.drops_first:
            lane = Lane(lane.token_ids[1:], lane.numbers[1:], lane.decoded[1:])
        if setting.added_first is not None:
            lane = Lane((setting.added_first, *lane.token_ids), (-1, *lane.numbers), (False, *lane.decoded))
        lanes.append(lane)
    if not setting.is_packed:
        return lanes
    return [_joined([lanes[at] for at in pack], setting.restarts) for pack in packs(places.rows, max_positions)]


def packs(rows: Sequence[Rollout], max_positions: int | None) -> list[list[int]]:
    """Return which rows are one sequence: those that say so; else all in their order, as many as fit."""
    named: dict[str, list[int]] = {}
    if any(row.pack is not None for row in rows):
        for at, row in enumerate(rows):
            named.setdefault(f"pack {row.pack}" if row.pack is not None else f"row {at}", []).append(at)
        return list(named.values())
    groups: list[list[int]] = [[]]
    for at, row in enumerate(rows):
        num_tokens = sum(len(rows[item].tokens) for item in groups[-1]) + len(row.tokens)
        if groups[-1] and max_positions is not None and num_tokens > max_positions:
            groups.append([])
        groups[-1].append(at)
    return groups


def _joined(lanes: Sequence[Lane], restarts: bool) -> Lane:
    return Lane(
        tuple(token for lane in lanes for token in lane.token_ids),
        tuple(number for lane in lanes for number in lane.numbers),
        tuple(decoded for lane in lanes for decoded in lane.decoded),
        tuple(at for lane in lanes for at in range(len(lane.token_ids))) if restarts else None,
    )
