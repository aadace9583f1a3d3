"""The job: walks through schemas, token by token, and both masks at each step."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.base.progress import Progress
from harness.errors import Code
from harness.extensions.fuzz.judge import DeadlineError, deadline
from harness.extensions.server.chat.automaton import SPACING, Automaton
from harness.extensions.server.chat.masks import is_open, name_token, schemas
from harness.extensions.server.chat.result import FunctionDifference, FunctionResult
from harness.extensions.server.chat.search import find_smallest

MaskFunction = Callable[[Mapping[str, Any], Sequence[int]], Any]
"""Takes a schema and the tokens of the answer so far; returns the ids that may come next, or a boolean a token."""
_MOST_STEPS = 40
_MOST_NAMES = 6
_TRIALS = 8
"""Schemas by which the convention of whitespace is chosen."""


class MaskCheck:
    """The check of one mask function; whatever it raises is a finding."""

    def __init__(self, hf: Any, mask: MaskFunction, limit_s: float, progress: Progress) -> None:
        self._hf, self._mask, self._limit_s, self._progress = hf, mask, limit_s, progress
        self._automaton, self._size = Automaton(hf), len(hf)
        self._hang: FunctionDifference | None = None
        self._texts = [hf.decode([own]) for own in range(self._size)]
        self._special = {own for own, token in hf.added_tokens_decoder.items() if token.special}
        self._walked: dict[tuple[str, str], list[FunctionDifference]] = {}
        self._num_masks = 0

    def result(self, model: str, num: int, seed: int, given: Sequence[Mapping[str, Any]]) -> FunctionResult:
        """Run the check, on so many generated schemas if none are given; raises HarnessError (BAD_SCHEMA)."""
        examples: list[Mapping[str, Any]] = list(given)
        if not given:
            find_smallest(schemas().map(examples.append), bool, num, seed)
        spacing = min(SPACING, key=lambda own: self._misfit(examples[:_TRIALS], own))
        names: dict[str, list[FunctionDifference]] = {}
        for at, schema in enumerate(examples):
            self._progress("schemas", at, len(examples))
            for own in self._walk(schema, spacing):
                names.setdefault(own.name, []).append(own)
        ordered = sorted(names, key=lambda own: -len(names[own]))[:_MOST_NAMES] if self._hang is None else []
        smallest = [self._smallest(names[own], spacing, 0 if given else num, seed) for own in ordered]
        return FunctionResult(
            subject=getattr(self._mask, "__name__", type(self._mask).__name__),
            model=model,
            counts={"mask": self._num_masks, "schema": len({repr(own) for own in examples})},
            differences=smallest if self._hang is None else [self._hang],
            not_judged={"the distribution inside of the mask": "a mask has none: harness sampler --only json_schema"},
            notes=(f"whitespace: {spacing}, the convention that fits best",),
        )

    def _misfit(self, examples: Sequence[Mapping[str, Any]], spacing: str) -> float:
        """Return how many tokens of a mask differ; all of them where a walk cannot go on."""
        before = self._num_masks
        found = [own for schema in examples for own in self._walk(schema, spacing)]
        num: int = sum(own.data["num_tokens"] for own in found)
        return num / max(1, self._num_masks - before)

    def _smallest(self, found: Sequence[FunctionDifference], spacing: str, num: int, seed: int) -> FunctionDifference:
        def shown(schema: Mapping[str, Any]) -> list[FunctionDifference]:
            return [own for own in self._walk(schema, spacing) if own.name == found[0].name]

        smaller = find_smallest(schemas(), lambda own: bool(shown(own)), num, seed) if num else None
        candidates: list[FunctionDifference] = [*found, *(shown(smaller) if smaller else ())]
        return min(candidates, key=lambda own: len(repr(own.shown)))

    def _walk(self, schema: Mapping[str, Any], spacing: str) -> list[FunctionDifference]:
        """Return the differences along a walk: of each mask and each name one token."""
        key = repr(schema), spacing
        if key not in self._walked:
            self._walked[key] = self._steps(schema, spacing)
        return self._walked[key]

    def _steps(self, schema: Mapping[str, Any], spacing: str) -> list[FunctionDifference]:
        chance, ids, found = random.Random(repr(schema)), list[int](), list[FunctionDifference]()
        while len(ids) < _MOST_STEPS and self._hf.eos_token_id not in ids:
            expected = self._automaton.allowed(schema, spacing, ids)
            actual, wrong = self._asked(schema, ids)
            if actual is None:
                return [*found, self._difference(schema, ids, wrong, None, 1)] if wrong else found
            both = np.flatnonzero(expected & actual)
            found += self._compared(schema, ids, expected, actual, is_last=not len(both))
            if not len(both):
                return found
            ids.append(self._next(both, chance))
        return found

    def _asked(self, schema: Mapping[str, Any], ids: Sequence[int]) -> tuple[NDArray[np.bool_] | None, str]:
        """Return a mask, or None and what is wrong; nothing is wrong after a mask that did not end."""
        if self._hang is not None:
            return None, ""
        self._num_masks += 1
        try:
            with deadline(self._limit_s):
                return self._booleans(self._mask(schema, list(ids))), ""
        except DeadlineError:
            self._hang = self._difference(schema, ids, f"a mask does not end within {self._limit_s:g} s", None, 1)
            return None, ""
        except (Exception, SystemExit) as error:
            return None, f"the mask raises {type(error).__name__}: {error}"[:200]

    def _booleans(self, returned: Any) -> NDArray[np.bool_]:
        own = np.asarray(
            returned if hasattr(returned, "__array__") or not isinstance(returned, Iterable) else [*returned]
        )
        if own.dtype == np.bool_ and own.ndim == 1 and len(own) >= self._size:
            return own[: self._size]
        if own.ndim != 1 or (own.size and (own.dtype.kind not in "iu" or own.min() < 0)):
            raise TypeError(f"neither ids nor a boolean for each of {self._size} tokens: {returned!r:.80}")
        mask = np.zeros(max(self._size, int(own.max(initial=0)) + 1), dtype=bool)
        mask[own.astype(int)] = True
        return mask[: self._size]

    def _compared(
        self,
        schema: Mapping[str, Any],
        ids: Sequence[int],
        expected: NDArray[np.bool_],
        actual: NDArray[np.bool_],
        *,
        is_last: bool,
    ) -> list[FunctionDifference]:
        before, names = self._hf.decode(list(ids)), dict[str, int]()
        differing = [
            int(own)
            for own in np.flatnonzero(expected != actual)
            if not is_open(before, self._texts[own], is_allowed=bool(actual[own]))
        ]
        counts = Counter[str]()
        for own in differing:
            name = name_token(
                before, self._texts[own], is_end=own == self._hf.eos_token_id, is_special=own in self._special,
                is_allowed=bool(actual[own]),
            )  # fmt: skip
            names.setdefault(name, own)
            counts[name] += 1
        return [self._difference(schema, ids, name, own, counts[name], is_last=is_last) for name, own in names.items()]

    def _difference(
        self,
        schema: Mapping[str, Any],
        ids: Sequence[int],
        name: str,
        token_id: int | None,
        num: int,
        *,
        is_last: bool = True,
    ) -> FunctionDifference:
        token, text = (
            "no mask" if token_id is None else f"{self._texts[token_id]!r}, {token_id}",
            self._hf.decode([*ids]),
        )
        token += f" ({num} differ in this mask)" if num > 1 else ""
        return FunctionDifference(
            code=Code.MASK_DIFFERS,
            name=name,
            shown={"schema": json.dumps(schema, ensure_ascii=False), "so far": repr(text), "token": token},
            data={"schema": schema, "token_ids": tuple(ids), "num_tokens": self._size if is_last else num},
        )

    def _next(self, allowed: NDArray[np.int64], chance: random.Random) -> int:
        """Return a token at random: every second one ends something, if any does."""
        ends = [int(own) for own in allowed if own == self._hf.eos_token_id or set(self._texts[own]) & set('"}],:')]
        return chance.choice(ends if ends and chance.random() < 0.5 else allowed.tolist())  # type: ignore[no-any-return]
