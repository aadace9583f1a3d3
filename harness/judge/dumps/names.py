"""What names say: the order of the run, and which tensors may be one quantity. Both are hints, and content decides."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.formats.tensors import TensorFolder

_NUMBER = r"\d{1,18}"
_LAYER = re.compile(rf"(?i)(?:layers?|blk|blocks?|(?<![a-z])[hl])[._\[-]?({_NUMBER})")
_KEEPS_CALLS = (".pt", ".pth", ".npz")
"""Files that keep the order in which a program put tensors into them."""
_BEGIN = re.compile(r"(?i)emb|wte|tok|rotary|rope|cos|sin|mask|position")
_STAGES = [
    re.compile(f"(?i){words}")
    for words in (
        r"input_layernorm|ln_?1|att(ention|n)_?norm|norm_?1", r"q(uery)?_?proj|wq|qkv|(?<![a-z])q(?![a-z])",
        r"k(ey)?_?proj|wk|(?<![a-z])k(?![a-z])", r"v(alue)?_?proj|wv|(?<![a-z])v(?![a-z])", r"[qk]_?norm", r"rot|rope",
        r"o_?proj|wo|out|dense|c_proj", r"att(ention|n)$", r"post_attention|ln_?2|(ffn|mlp)_?norm",
        r"gate|router|w1", r"up|w3|fc1", r"act", r"down|w2|fc2", r"(mlp|ffn|moe|experts)$",
    )
]  # fmt: skip
"""Operations of a layer in their usual order."""


def plain_names(folder: TensorFolder) -> dict[str, str]:
    """Return, by the full names, the names in the files, or of files that are one tensor those without the suffix."""
    paths = {name: (path.relative_to(folder.path), inner) for name, (path, inner) in folder.places.items()}
    return {name: inner or str(path.with_suffix("")) for name, (path, inner) in paths.items()}


def run_order(folder: TensorFolder) -> tuple[int, list[str], str]:
    """Return how much the order of a folder is worth, its names in the order of the run, and what tells the order."""
    names = plain_names(folder)
    natural = sorted(names, key=lambda name: _natural(folder.places[name][0]))  # in a file, its own order
    texts = [names[name] for name in natural]
    layers = [int(at[1]) for at in map(_LAYER.search, texts) if at is not None]
    is_called = layers == sorted(layers) and texts != sorted(texts)
    files = {path for path, _inner in folder.places.values()}
    if is_called and len(files) < len(names) and all(path.suffix.lower() in _KEEPS_CALLS for path in files):
        return 3, natural, "the order in which the tensors stand in the files"
    counts = [re.split(f"({_NUMBER})", text) for text in texts]  # words and numbers, one after the other
    at = next((at for at, parts in enumerate(zip(*counts, strict=False)) if len(set(parts)) > 1), 0)
    if at % 2 and len({int(parts[at]) for parts in counts}) == len(names):
        return (
            2,
            sorted(natural, key=lambda name: int(re.split(f"({_NUMBER})", names[name])[at])),
            "the numbers in the names",
        )
    if 2 * len(layers) >= len(names):
        what = "the numbers of layers in the names, and in a layer the usual order of operations"
        return 1, sorted(natural, key=lambda name: _stage(names[name])), what
    return 0, natural, "the names of the files, which may not be the order of the run"


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(f"({_NUMBER})", str(path))]


def _stage(text: str) -> tuple[int, int]:
    layer = _LAYER.search(text)
    if layer is None:
        return (-1, 0) if _BEGIN.search(text) else (1 << 62, "head" in text or "logit" in text)
    stages = [at for at, words in enumerate(_STAGES) if words.search(text[layer.end() :])]
    return int(layer[1]), stages[-1] if stages else len(_STAGES)


@dataclass(slots=True)
class _Rule:
    """How the numbers in names of the second folder follow from those in names of the first."""

    count: int
    """Pairs that content matched."""
    sources: list[set[int]]
    """For each number, places of the same one in the first name, in all pairs."""
    values: list[set[int]]
    """For each number, all values."""

    def fits(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Whether two names may be a pair: some number follows from the first name's, or there are none."""
        for at, (sources, values) in enumerate(zip(self.sources, self.values, strict=True)):
            is_free = self.count == 1 or len(values) > 1  # such as the number of a call
            source = first[at if at in sources else max(sources)] if sources else None
            if second[at] != source if sources else not is_free and second[at] not in values:
                return False
        return any(self.sources) or not second


class NameHints:
    """Which names of two folders stand for one quantity, as far as pairs that content matched show it."""

    def __init__(self, first: Mapping[str, str], second: Mapping[str, str]) -> None:
        """Take the plain names by the full ones."""
        self._plain = first, second
        self._common = set(first.values()) & set(second.values())
        self._num_kept = self._num_changed = 0
        self._rules: dict[tuple[str, str], _Rule] = {}
        self._counts: Counter[tuple[int, str]] = Counter()

    def learn(self, names: tuple[str, str]) -> None:
        """Take a pair that content matched."""
        first, second = (plain[name] for plain, name in zip(self._plain, names, strict=True))
        if first in self._common:
            self._num_kept += first == second
            self._num_changed += first != second
        (template, numbers), (template_two, numbers_two) = _parts(first), _parts(second)
        same = [{at for at, value in enumerate(numbers) if value == number} for number in numbers_two]
        rule = self._rules.setdefault((template, template_two), _Rule(0, same, [set() for _ in same]))
        rule.count += 1
        for at, number in enumerate(numbers_two):
            rule.sources[at] &= same[at]
            rule.values[at].add(number)
        self._counts.update([(0, template), (1, template_two)])

    def likeness(self, names: tuple[str, str]) -> int:
        """Return 2 for one name, 1 for names that stand for each other elsewhere, 0 for any others."""
        first, second = (plain[name] for plain, name in zip(self._plain, names, strict=True))
        if first == second:
            return 2 * (self._num_kept >= self._num_changed)
        (template, numbers), (template_two, numbers_two) = _parts(first), _parts(second)
        rule = self._rules.get((template, template_two))
        is_usual = rule and 2 * rule.count > max(self._counts[0, template], self._counts[1, template_two])
        return int(bool(rule and is_usual and rule.fits(numbers, numbers_two)))


@cache
def _parts(text: str) -> tuple[str, Sequence[int]]:
    return re.sub(_NUMBER, "#", text), tuple(map(int, re.findall(_NUMBER, text)))
