"""Attention over a paged cache, small enough to be written out: two requests in chunks, blocks of three tokens.

`N` query heads, `K` KV heads, `H` head size. What a row should give is summed key by key (`context`), and not by the
code under test.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from harness.formats.recording import Recording
from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.core.wrong_operation import WrongOperation

from .toys import ToyModel, failure_of, random, recorded

N, K, H, BLOCK = 6, 2, 4, 3
LENGTHS, PROMPTS = (10, 7), (6, 4)
STEPS = (
    {0: range(4), 1: range(1)},
    {0: range(4, 6), 1: range(1, 5)},
    {0: range(6, 7), 1: range(5, 6)},
    {0: range(7, 8), 1: range(6, 7)},
    {0: range(8, 9)},
)
"""The positions of each request that a step computes."""
READBACK = len(STEPS)
"""The step in which the cache is read back."""
TABLES = {0: [3, 1, 5], 1: [2, 4, 6]}
Q, KEY, RAW, VALUE, OUT = (
    "model.layers.1." + name for name in ("q_rope", "k_rope", "self_attn.k_norm", "self_attn.v_proj", "attention")
)
K_CACHE, V_CACHE = "model.layers.1.k_cache", "model.layers.1.v_cache"
Place = tuple[int, int]
"""Request and position."""


def step_of(place: Place) -> int:
    """Return the step that computes a position."""
    request, position = place
    return next(at for at, step in enumerate(STEPS) if position in step.get(request, ()))


PLACES: list[Place] = [(r, p) for r in (0, 1) for step in STEPS for p in step.get(r, ())]
"""Every row that is computed, request by request."""


def graph() -> tuple[Operation, ...]:
    """Return the operations of three layers that attention's explanations look at."""
    explanation: list[Operation] = []
    for layer in (0, 1, 2):
        prefix = f"model.layers.{layer}."
        q, k, raw, v = (f"{prefix}{name}" for name in ("q_rope", "k_rope", "self_attn.k_norm", "self_attn.v_proj"))
        explanation += [
            Operation(tap=raw, kind=Kind.NORM),
            Operation(tap=q, kind=Kind.ROTARY),
            Operation(tap=k, kind=Kind.ROTARY, inputs=(raw,)),
            Operation(tap=v, kind=Kind.LINEAR),
            Operation(tap=f"{prefix}k_cache", kind=Kind.CACHE, inputs=(k,)),
            Operation(tap=f"{prefix}v_cache", kind=Kind.CACHE, inputs=(v,)),
            Operation(tap=f"{prefix}attention", kind=Kind.ATTENTION, inputs=(q, k, v)),
        ]
    return tuple(explanation)


class Toy:
    """One recording, and the failures of its second layer's attention, of three."""

    def __init__(
        self, folder: Path, *, tables: Callable[[int, int], Sequence[int]] | None = None, **parts: object
    ) -> None:
        """Record it.

        Args:
            folder: where.
            tables: gives the block table of a request in a step, as long as it ever gets.
            parts: of the attention: `window`, `softcap`, `sinks`, `scale`; `misplaced`, a slot by place; `readback`,
                tensors by place for each of the cache's taps; `is_slotted`, whether slots are recorded; `omitted`, taps
                that are not recorded; `tokens` of both requests; `value_size`, elements of a value's head.
        """
        self._tables = tables or (lambda request, _step: TABLES[request])
        self.misplaced: Mapping[Place, int] = parts.pop("misplaced", {})
        self.readback: Mapping[str, Mapping[Place, torch.Tensor]] = parts.pop("readback", {})
        self.is_slotted, self.omitted = parts.pop("is_slotted", True), parts.pop("omitted", ())
        self.tokens, self.value_size = parts.pop("tokens", None), parts.pop("value_size", H)
        self.parts = {"scale": 0.4, "window": None, **parts}
        others = {f"model.layers.{layer}.{name}": K for layer in (0, 2) for name in ("k_rope", "self_attn.v_proj")}
        widths = {Q: N, KEY: K, RAW: K, VALUE: K, **others}
        self.tensors = {
            tap: {place: random(heads, self.size(tap), seed=100 * at + number) for number, place in enumerate(PLACES)}
            for at, (tap, heads) in enumerate(widths.items())
        }
        """[heads, H] of each place, by tap; the size of a value's head may be another."""
        self.recording = self._recorded(folder)

    def size(self, tap: str) -> int:
        """Return the elements of one head of a tap."""
        return self.value_size if tap.endswith("v_proj") else H

    def _recorded(self, folder: Path) -> Recording:
        steps = [self._step(step, at) for at, step in enumerate(STEPS)]
        if self.readback:
            (places,) = {tuple(values) for values in self.readback.values()}
            taps = {tap: torch.stack([values[place] for place in places]) for tap, values in self.readback.items()}
            steps.append({
                "phase": "readback", "taps": taps,
                "request": [place[0] for place in places], "position": [place[1] for place in places],
                **({"block_tables": {r: list(self._tables(r, READBACK)) for r in (0, 1)}} if self.is_slotted else {}),
            })  # fmt: skip
        lengths = tuple(zip(LENGTHS, PROMPTS, strict=True))
        return recorded(folder, steps, lengths=lengths, dtype="float64", tokens=self.tokens)

    def _step(self, step: Mapping[int, range], at: int) -> dict[str, object]:
        places = [(request, position) for request, positions in step.items() for position in positions]
        taps = {
            tap: torch.stack([values[place] for place in places])
            for tap, values in self.tensors.items()
            if tap not in self.omitted
        }
        hypotheses: dict[str, object] = {
            "request": [place[0] for place in places], "position": [place[1] for place in places],
            "taps": {**taps, OUT: torch.zeros(len(places), N * self.value_size, dtype=torch.float64)},
        }  # fmt: skip
        if self.is_slotted:
            hypotheses["slot_mapping"] = [self.misplaced.get(place, self.slot(*place)) for place in places]
            hypotheses["block_tables"] = {request: self.table(request, at) for request in step}
        return hypotheses

    def table(self, request: int, step: int) -> list[int]:
        """Return the block table of a request in a step that computes some of it."""
        return list(self._tables(request, step)[: max(STEPS[step][request]) // BLOCK + 1])

    def slot(self, request: int, position: int) -> int:
        """Return where the block table puts a position in the step that computes it."""
        return self.table(request, step_of((request, position)))[position // BLOCK] * BLOCK + position % BLOCK

    def held(self, step: int) -> dict[int, Place]:
        """Return whose key and value each slot holds by the end of a step."""
        order = sorted(PLACES, key=lambda place: (step_of(place), place))
        slots = {place: self.misplaced.get(place, self.slot(*place)) for place in order if step_of(place) <= step}
        return {slot: place for place, slot in slots.items() if slot >= 0}

    def context(
        self,
        place: Place,
        seen: Iterable[Place | None] | None = None,
        *,
        key: Callable[[Place], torch.Tensor] | None = None,
        value: Callable[[Place], torch.Tensor] | None = None,
        heads: Sequence[int] = (0, 0, 0, 1, 1, 1),
        value_heads: Sequence[int] | None = None,
        scale: float | None = None,
        cap: float | None = None,
        extra: Sequence[float] | float = 0.0,
    ) -> torch.Tensor:
        """Return one row [N*H].

        Args:
            place: the row.
            seen: what it reads, None in it for zeros; its own request up to itself without.
            key: [K, H] of a place.
            value: [K, H] of a place.
            heads: KV head of each query head.
            value_heads: the one whose values it reads.
            scale: of the scores.
            cap: soft cap of the scores.
            extra: what each head's sum of exponentials has besides.
        """
        request, position = place
        read = [(request, p) for p in range(position + 1)] if seen is None else list(seen)
        scale = self.parts["scale"] if scale is None else scale
        no_key, no_value = (torch.zeros(K, size, dtype=torch.float64) for size in (H, self.value_size))
        keys = [no_key if item is None else (key or self.tensors[KEY].__getitem__)(item) for item in read]
        values = [no_value if item is None else (value or self.tensors[VALUE].__getitem__)(item) for item in read]
        rows = []
        for head, (k, v) in enumerate(zip(heads, heads if value_heads is None else value_heads, strict=True)):
            scores = [float(self.tensors[Q][place][head] @ item[k]) * scale for item in keys]
            shares = [math.exp(score if cap is None else cap * math.tanh(score / cap)) for score in scores]
            total = sum(shares) + (extra if isinstance(extra, float) else extra[head])
            parts = [share / total * item[v] for share, item in zip(shares, values, strict=True)]
            rows.append(torch.stack(parts).sum(dim=0) if parts else torch.zeros(self.value_size, dtype=torch.float64))
        return torch.cat(rows)

    def contexts(self, places: Sequence[Place], row: Callable[[Place], torch.Tensor] | None = None) -> torch.Tensor:
        """Return [R, N*H]: what `row` gives of each place, or what the attention should give."""
        return torch.stack([(row or self.context)(place) for place in places])

    def failure(
        self,
        actual: torch.Tensor | Callable[[Place], torch.Tensor] | None = None,
        places: Sequence[Place] = PLACES,
        *,
        expected: Callable[[Place], torch.Tensor] | None = None,
        **others: object,
    ) -> WrongOperation:
        """Return the failure of rows that are `actual`, [R, N*H] or what it gives of each place."""
        operations = graph()
        right = next(operation for operation in operations if operation.tap == OUT)
        meant = self.contexts(places, expected)
        return failure_of(
            right,
            meant if actual is None else actual if isinstance(actual, torch.Tensor) else self.contexts(places, actual),
            meant,
            model=ToyModel(*operations, head_dim=H, hidden_size=20),
            recording=self.recording, request=[place[0] for place in places],
            position=[place[1] for place in places], step=[step_of(place) for place in places],
            views=tuple(self._view([place for place in places if place[0] == request])
                        for request in dict.fromkeys(place[0] for place in places)),
            **others,
        )  # fmt: skip

    def cache_failure(
        self,
        actual: Callable[[Place], torch.Tensor],
        places: Sequence[Place] = PLACES,
        *,
        tap: str = K_CACHE,
        dtype: torch.dtype = torch.float32,
    ) -> WrongOperation:
        """Return the failure of rows [K, H] of the cache that are read back as `actual` gives them of each place."""
        operations = graph()
        right = next(operation for operation in operations if operation.tap == tap)
        written = self.tensors[right.inputs[0]]
        return failure_of(
            right, torch.stack([actual(place).flatten() for place in places]),
            torch.stack([written[place].flatten() for place in places]),
            model=ToyModel(*operations, head_dim=H), recording=self.recording, dtype=dtype,
            request=[place[0] for place in places], position=[place[1] for place in places],
            step=[READBACK] * len(places),
        )  # fmt: skip

    def _view(self, places: Sequence[Place]) -> AttentionContext:
        request = places[0][0]
        history = [(request, position) for position in range(max(position for _, position in places) + 1)]
        return AttentionContext(
            rows=Rows(
                request=torch.full((len(places),), request),
                position=torch.tensor([position for _, position in places]),
                step=torch.tensor([step_of(place) for place in places]),
            ),
            query=torch.stack([self.tensors[Q][place] for place in places]),
            key=torch.stack([self.tensors[KEY][place] for place in history]),
            value=torch.stack([self.tensors[VALUE][place] for place in history]),
            key_step=torch.tensor([step_of(place) for place in history]),
            **self.parts,
        )
