"""The check of a mask function: random walks through JSON schemas, with both masks at each token."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from numpy.typing import NDArray

from harness.base.progress import Progress
from harness.errors import Code
from harness.extensions.fuzz.judge import DeadlineError, deadline
from harness.extensions.server.chat.automaton import SPACING, Automaton
from harness.extensions.server.chat.result import FunctionDifference, FunctionResult
from harness.extensions.server.chat.search import find_smallest

_KEYS = ("a", "b", "name", "x y", "\u00e9")
_CONSTANTS = ("", "a", "a b", "\u00e9", 0, -1, 10, True, None)
"""None with an escape: libraries differ in whether a constant may be written with another one."""
_NUMBER = re.compile(r"[-+.eE\d]+")
_KINDS = {
    '"': "the beginning of a string", "{": "an object", "[": "an array", "tfn": "a constant", ",": "a comma",
    ":": "a colon", "}": "the end of an object", "]": "the end of an array",
}  # fmt: skip
"""What begins with a character."""
_ESCAPE = r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})"
_CHARACTERS = re.compile(rf'(?:[^"\\]|{_ESCAPE})*(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?')
MaskFunction = Callable[[Mapping[str, Any], Sequence[int]], Any]
"""Takes a schema and the tokens of the answer so far; returns the ids that may come next, or a boolean a token."""
_MOST_STEPS = 40
_MOST_NAMES = 6
_TRIALS = 8
"""Schemas by which the convention of whitespace is chosen."""


def schemas() -> SearchStrategy[dict[str, Any]]:
    """Return a strategy for schemas of objects: all properties required, no others."""
    leaves: SearchStrategy[dict[str, Any]] = st.sampled_from(
        [{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]
    ) | st.lists(st.sampled_from(_CONSTANTS), min_size=1, max_size=3, unique_by=repr).map(
        lambda constants: {"enum": constants}
    )
    nested = st.recursive(leaves, _nested, max_leaves=4)
    return st.dictionaries(st.sampled_from(_KEYS), nested, min_size=1, max_size=3).map(object_of)


def _nested(inner: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": drawn[1] + drawn[2]}
    )
    objects = st.dictionaries(st.sampled_from(_KEYS), inner, min_size=1, max_size=2).map(object_of)
    return arrays | objects | st.lists(inner, min_size=2, max_size=2).map(lambda options: {"anyOf": options})


def object_of(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties} | required


def is_open(before: str, token: str, *, is_allowed: bool) -> bool:
    """Return whether a token may be allowed or not: DEL in a string, and escapes of JSON that llguidance leaves out."""
    if not is_allowed or not _is_in_string(before) or "\x7f" in token:
        return "\x7f" in token
    _, mark, begun = re.sub(_ESCAPE, "", before).rpartition("\\")
    text = f"{mark}{begun}{token}" if mark else token
    rest = _CHARACTERS.sub("", text, count=1)
    return "\\" in text and rest[:1] in ("", '"')


def name_token(before: str, token: str, *, is_end: bool, is_special: bool, is_allowed: bool) -> str:
    """Return what is wrong about one token.

    `token` is the text of the token, with U+FFFD for a part of a character. `is_allowed` says that the mask allows it,
    and the reference does not; else it is the other way around.
    """
    if is_end:
        return "the answer may end before it is whole" if is_allowed else "a whole answer may not end"
    how = "is allowed" if is_allowed else "is masked"
    if is_special:
        return f"a special token {how}"
    if _is_in_string(before):
        return f"{_in_string(token)} {how}"
    if not token.strip():
        return f"whitespace between values {how}"
    if _NUMBER.fullmatch(token):
        return f"a part of a number {how}"
    kind = next((kind for first, kind in _KINDS.items() if token.strip()[0] in first), "text that is no JSON")
    return f"{kind}{' and more in the same token' if len(token.strip()) > 1 and kind != 'a constant' else ''} {how}"


def _in_string(token: str) -> str:
    if "\ufffd" in token:
        return "a part of a character"
    if any(ord(character) < 32 for character in token):
        return "a control character in a string"
    if "\\" in token:
        return "an escape"
    if '"' in token:
        return "the end of a string" + ("" if token == '"' else " and more in the same token")
    return "a character of a string" if token.isascii() else "a character outside of ASCII"


def _is_in_string(text: str) -> bool:
    return len(re.findall(r'"', re.sub(r"\\.", "", text))) % 2 == 1


class MaskCheck:
    """The check of one mask function; an exception of the function is a finding."""

    def __init__(self, hf: Any, mask: MaskFunction, limit_s: float, progress: Progress) -> None:
        self._hf, self._mask, self._limit_s, self._progress = hf, mask, limit_s, progress
        self._automaton, self._size = Automaton(hf), len(hf)
        self._hang: FunctionDifference | None = None
        self._texts = [hf.decode([token_id]) for token_id in range(self._size)]
        self._special = {token_id for token_id, token in hf.added_tokens_decoder.items() if token.special}
        self._walked: dict[tuple[str, str], list[FunctionDifference]] = {}
        self._num_masks = 0

    def result(self, model: str, num: int, seed: int, user_schemas: Sequence[Mapping[str, Any]]) -> FunctionResult:
        """Run the check on the user's schemas, else on `num` generated ones; raises HarnessError (BAD_SCHEMA)."""
        examples: list[Mapping[str, Any]] = list(user_schemas)
        if not user_schemas:
            find_smallest(schemas().map(examples.append), bool, num, seed)
        spacing = min(SPACING, key=lambda convention: self._misfit(examples[:_TRIALS], convention))
        names: dict[str, list[FunctionDifference]] = {}
        for at, schema in enumerate(examples):
            self._progress("schemas", at, len(examples))
            for difference in self._walk(schema, spacing):
                names.setdefault(difference.name, []).append(difference)
        ordered = sorted(names, key=lambda name: -len(names[name]))[:_MOST_NAMES] if self._hang is None else []
        smallest = [self._smallest(names[name], spacing, 0 if user_schemas else num, seed) for name in ordered]
        return FunctionResult(
            subject=getattr(self._mask, "__name__", type(self._mask).__name__),
            model=model,
            counts={"mask": self._num_masks, "schema": len({repr(schema) for schema in examples})},
            differences=smallest if self._hang is None else [self._hang],
            not_judged={
                "the distribution inside of the mask": "a mask has none: harness server sampler --only json_schema"
            },
            notes=(f"whitespace: {spacing}, the convention that fits best",),
        )

    def _misfit(self, examples: Sequence[Mapping[str, Any]], spacing: str) -> float:
        """Return how many tokens of a mask differ; all of them where a walk cannot go on."""
        before = self._num_masks
        differences = [difference for schema in examples for difference in self._walk(schema, spacing)]
        num: int = sum(difference.data["num_tokens"] for difference in differences)
        return num / max(1, self._num_masks - before)

    def _smallest(
        self, differences: Sequence[FunctionDifference], spacing: str, num: int, seed: int
    ) -> FunctionDifference:
        def shown(schema: Mapping[str, Any]) -> list[FunctionDifference]:
            return [difference for difference in self._walk(schema, spacing) if difference.name == differences[0].name]

        smaller = find_smallest(schemas(), lambda schema: bool(shown(schema)), num, seed) if num else None
        candidates: list[FunctionDifference] = [*differences, *(shown(smaller) if smaller else ())]
        return min(candidates, key=lambda difference: len(repr(difference.shown)))

    def _walk(self, schema: Mapping[str, Any], spacing: str) -> list[FunctionDifference]:
        """Return the differences along a walk: of each mask and each name one token."""
        key = repr(schema), spacing
        if key not in self._walked:
            self._walked[key] = self._steps(schema, spacing)
        return self._walked[key]

    def _steps(self, schema: Mapping[str, Any], spacing: str) -> list[FunctionDifference]:
        chance, ids, differences = random.Random(repr(schema)), list[int](), list[FunctionDifference]()
        while len(ids) < _MOST_STEPS and self._hf.eos_token_id not in ids:
            expected = self._automaton.allowed(schema, spacing, ids)
            actual, wrong = self._asked(schema, ids)
            if actual is None:
                return [*differences, self._difference(schema, ids, wrong, None, 1)] if wrong else differences
            both = np.flatnonzero(expected & actual)
            differences += self._compared(schema, ids, expected, actual, is_last=not len(both))
            if not len(both):
                return differences
            ids.append(self._next(both, chance))
        return differences

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
        array = np.asarray(
            returned if hasattr(returned, "__array__") or not isinstance(returned, Iterable) else [*returned]
        )
        if array.dtype == np.bool_ and array.ndim == 1 and len(array) >= self._size:
            return array[: self._size]
        if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0)):
            raise TypeError(f"neither ids nor a boolean for each of {self._size} tokens: {returned!r:.80}")
        mask = np.zeros(max(self._size, int(array.max(initial=0)) + 1), dtype=bool)
        mask[array.astype(int)] = True
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
            int(token_id)
            for token_id in np.flatnonzero(expected != actual)
            if not is_open(before, self._texts[token_id], is_allowed=bool(actual[token_id]))
        ]
        counts = Counter[str]()
        for token_id in differing:
            name = name_token(
                before,
                self._texts[token_id],
                is_end=token_id == self._hf.eos_token_id,
                is_special=token_id in self._special,
                is_allowed=bool(actual[token_id]),
            )
            names.setdefault(name, token_id)
            counts[name] += 1
        return [
            self._difference(schema, ids, name, token_id, counts[name], is_last=is_last)
            for name, token_id in names.items()
        ]

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
        """Return a random token. Half of the time it is one that ends a value, if there is one."""
        ends = [
            int(token_id)
            for token_id in allowed
            if token_id == self._hf.eos_token_id or set(self._texts[token_id]) & set('"}],:')
        ]
        return chance.choice(ends if ends and chance.random() < 0.5 else allowed.tolist())  # type: ignore[no-any-return]
