"""Properties of tokens: how they are drawn, where a request ends, and how they become text.

Sampling: which tokens may be drawn, how often, and that a request draws the same tokens in any batch. Temperature,
top-k, top-p and min-p are applied in this order, as transformers does. Stopping: every end-of-sequence token that the
checkpoint names ends a request, and no other token does. Tokenizer: text comes back, whole and in pieces.

Shapes: R rows, V vocab.
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from harness.base.files import scratch_folder
from harness.oracle.sampling import Chain, SamplingSettings
from harness.properties.core.falsify import calling, falsify
from harness.properties.core.findings import Counterexample, Rejections, raise_all
from harness.properties.ops.adapter import OpsUnderTest

_SLACK = 5e-6
"""In nats: the room for a sum of probabilities in float32 at the edge of top-p or min-p."""
_NUM_DRAWS = 2000
_LEAST_EXPECTED = 5
"""Draws that a cell of the chi-square test needs."""
_SEEDS = (*range(_NUM_DRAWS), *range(1 << 16, (1 << 16) + 500))
"""Of the draws that are counted, and of some that are drawn again where seeds are cut to 16 bits."""
_SHOWN_SEEDS = f"[*range({_NUM_DRAWS}), *range({1 << 16}, {(1 << 16) + 500})]"
_NUM_REPEATED = 40
_LEAST_LOG_CHANCE = -30.0
_PERIODS = (*(1 << power for power in range(1, 10)), 1 << 16)
_WIDE_VOCAB, _LIKELY = 70_000, 65_539
"""Tokens of a vocabulary that 16 bits cannot number, and one that is 3 where ids are cut to them."""
_LARGEST_Z = 5.2
"""In standard deviations: a fair sampler exceeds it once in ten million tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """One row: how it is sampled, and from what."""

    logits: tuple[float, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def probabilities(self, slack: float = 0.0) -> torch.Tensor:
        """Return [V] float64: what each token is to be drawn with, some more by `slack` at the edges of the sets."""
        settings = SamplingSettings(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
        return Chain().probabilities(torch.tensor(self.logits, dtype=torch.float64), settings, slack=slack)


def check_sampling(named: Any, settings: Settings) -> Rejections:
    """Check the sets, the distribution and the seeds of `sample` with top-k, top-p and min-p; nothing without it.

    Raises:
        PropertyError: one property does not hold.
    """
    target = OpsUnderTest(named)
    if not target.offers("sample"):
        return Rejections()
    few = Settings(settings, max_examples=max(10, settings.max_examples // 4))
    # Of equally likely tokens at the edge of a set, any may be the one that is in it.
    unequal = _requests().filter(lambda request: len({*request.logits}) == len(request.logits))
    in_set = "a sampled token is in the set", partial(_check_sets, target)
    same = "a request draws the same in any batch", partial(_check_batches, target)
    often = "tokens come as often as is likely", partial(check_frequency, target)
    return raise_all(
        [
            partial(falsify, "a token has more than 16 bits", partial(check_wide, target), st.just(None), few),
            partial(falsify, *in_set, _repeated(), settings),
            partial(falsify, *in_set, _batches(), settings),
            partial(falsify, *same, _batches(), settings),
            partial(falsify, *often, unequal, few),
        ]
    )


def _check_sets(target: OpsUnderTest, batch: Sequence[SampledRow]) -> None:
    tokens = _sample(target, batch)
    for row, (request, token) in enumerate(zip(batch, tokens, strict=True)):
        allowed = request.probabilities(slack=_SLACK).nonzero().flatten().tolist()
        if token not in allowed:
            ending = [f"assert tokens[{row}] in {allowed}"]
            raise Counterexample(
                f"row {row} drew token {token}, which is none of {allowed}", _program(target, batch, ending)
            )


def check_wide(target: OpsUnderTest, _case: None) -> None:
    """Check that a token beyond 65,535 is drawn where it is the only likely one; raises Counterexample."""
    logits = torch.full((1, _WIDE_VOCAB), -100.0).index_fill(1, torch.tensor([_LIKELY]), 100.0)
    arguments: dict[str, Any] = {"temperatures": [1.0], "top_ks": [0], "top_ps": [1.0], "min_ps": [0.0], "seeds": [0]}
    lines = [
        f"logits = torch.full((1, {_WIDE_VOCAB}), -100.0).index_fill(1, torch.tensor([{_LIKELY}]), 100.0)",
        f"assert list({target.name}.sample(logits, **{arguments})) == [{_LIKELY}]",
    ]
    program = "\n".join(["import torch", *target.opening(), "", *lines]) + "\n"
    with calling("sample", lambda: program):
        (token,) = target.adapter.sample(logits, **arguments)
    if int(token) != _LIKELY:
        raise Counterexample(f"token {int(token)} was drawn, and {_LIKELY} alone is likely", program)


def _check_batches(target: OpsUnderTest, batch: Sequence[SampledRow]) -> None:
    tokens = _sample(target, batch)
    for row, request in enumerate(batch):
        alone = _sample(target, [request])
        if alone != [tokens[row]]:
            again = _call(target, [request], "alone")
            ending = [*again, f"assert list(alone) == [tokens[{row}]]"]
            raise Counterexample(
                f"row {row} drew {tokens[row]} in the batch, {alone[0]} alone", _program(target, batch, ending)
            )


def check_frequency(target: OpsUnderTest, request: SampledRow) -> None:
    """Count what a request draws with many seeds, and test that with chi-square.

    Raises:
        Counterexample: tokens come more or less often than they should.
    """
    p = request.probabilities()
    near = request.probabilities(slack=_SLACK) - p
    if request.temperature == 0 or near.abs().max() > 1e-9:
        return  # nothing is drawn, or the set depends on rounding
    tokens = _sample(target, [replace(request, seed=seed) for seed in _SEEDS])
    _check_periods(target, request, tokens, float(p.square().sum()))
    counts = Counter(tokens[:_NUM_DRAWS])
    cells = _cells((p * _NUM_DRAWS).tolist())
    statistic = sum((sum(counts[token] for token in cell) - wanted) ** 2 / wanted for cell, wanted in cells)
    largest = _largest_chi_square(len(cells) - 1)
    if statistic > largest:
        pairs = ", ".join(
            f"tokens {cell}: {sum(counts[token] for token in cell)} for {wanted:.0f}" for cell, wanted in cells
        )
        program = [
            "import torch", *target.opening(), "", *_many_calls(target, request),
            f"tokens = tokens[:{_NUM_DRAWS}]",
            f"cells = {cells}  # tokens, and how often they should come",
            "chi_square = sum((sum(map(tokens.count, own)) - wanted) ** 2 / wanted for own, wanted in cells)",
            f"assert chi_square <= {largest!r}",
        ]  # fmt: skip
        what = f"chi-square {statistic:.3g}, against a bound of {largest:.3g}: {pairs}"
        raise Counterexample(what, "\n".join(program) + "\n")


def _check_periods(target: OpsUnderTest, request: SampledRow, tokens: Sequence[int], alike: float) -> None:
    """Check that seeds a power of two apart draw otherwise; `alike` is how often two draws are the same by chance."""
    by_seed = dict(zip(_SEEDS, tokens, strict=True))
    for period in _PERIODS:
        pairs = [(token, by_seed[seed + period]) for seed, token in by_seed.items() if seed + period in by_seed]
        if all(first == second for first, second in pairs) and len(pairs) * math.log(alike) < _LEAST_LOG_CHANCE:
            lines = [
                *_many_calls(target, request),
                "by_seed = dict(zip(seeds, tokens))",
                f"assert any(by_seed[s] != by_seed[s + {period}] for s in seeds if s + {period} in by_seed)",
            ]
            program = "\n".join(["import torch", *target.opening(), "", *lines]) + "\n"
            raise Counterexample(f"each seed draws the same as the one {period} after it", program)


def _cells(expected: Sequence[float]) -> list[tuple[list[int], float]]:
    """Return sets of tokens with how often they should come, each often enough for a chi-square test (Cochran 1954).

    Rare tokens make a cell together; where they are too few for one, they go with the least common of the others.
    """
    rare = [token for token, number in enumerate(expected) if number < _LEAST_EXPECTED]
    others = sorted(set(range(len(expected))) - set(rare), key=lambda token: -expected[token])
    sets = [[token] for token in others]
    if sum(expected[token] for token in rare) >= _LEAST_EXPECTED:
        sets.append(rare)
    else:
        sets[-1] += rare
    return [(cell, sum(expected[token] for token in cell)) for cell in sets]


def _largest_chi_square(num_free: int) -> float:
    """Return the bound of a chi-square statistic (Wilson and Hilferty 1931)."""
    if num_free == 0:
        return 1e-9
    return num_free * (1 - 2 / (9 * num_free) + _LARGEST_Z * math.sqrt(2 / (9 * num_free))) ** 3


def _sample(target: OpsUnderTest, batch: Sequence[SampledRow]) -> list[int]:
    logits = torch.tensor([request.logits for request in batch])
    with calling("sample", lambda: _program(target, batch, [])):
        tokens = target.adapter.sample(
            logits,
            temperatures=[request.temperature for request in batch],
            top_ks=[request.top_k for request in batch],
            top_ps=[request.top_p for request in batch],
            min_ps=[request.min_p for request in batch],
            seeds=[request.seed for request in batch],
        )
    return [int(token) for token in tokens]


def _program(target: OpsUnderTest, batch: Sequence[SampledRow], ending: Sequence[str]) -> str:
    return "\n".join(["import torch", *target.opening(), "", *_call(target, batch, "tokens"), *ending]) + "\n"


def _call(target: OpsUnderTest, batch: Sequence[SampledRow], name: str) -> list[str]:
    columns = {
        keyword: [getattr(request, field) for request in batch]
        for keyword, field in (
            ("temperatures", "temperature"), ("top_ks", "top_k"), ("top_ps", "top_p"), ("min_ps", "min_p"),
            ("seeds", "seed"),
        )
    }  # fmt: skip
    rows = [list(request.logits) for request in batch]
    return [
        f"{name} = {target.name}.sample(",
        f"    torch.tensor({rows}),",
        *(f"    {keyword}={values}," for keyword, values in columns.items()),
        ")",
    ]


def _many_calls(target: OpsUnderTest, request: SampledRow) -> list[str]:
    number = f"* {len(_SEEDS)}"
    return [
        f"seeds = {_SHOWN_SEEDS}",
        f"tokens = {target.name}.sample(",
        f"    torch.tensor([{list(request.logits)}] {number}),",
        f"    temperatures=[{request.temperature}] {number}, top_ks=[{request.top_k}] {number},",
        f"    top_ps=[{request.top_p}] {number}, min_ps=[{request.min_p}] {number}, seeds=seeds,",
        ")",
        "tokens = list(map(int, tokens))",
    ]


@st.composite
def _requests(draw: DrawFn, vocab_size: int | None = None) -> SampledRow:
    size = draw(st.integers(2, 8)) if vocab_size is None else vocab_size
    both = st.just({"top-k", "top-p"})  # often: of which tokens top-p is taken shows in some rows alone
    filters = draw(both | st.sets(st.sampled_from(("top-k", "top-p", "min-p"))))  # each alone, too: one hides another
    return SampledRow(
        logits=tuple(draw(st.lists(st.integers(-12, 12).map(lambda x: x / 4), min_size=size, max_size=size))),
        temperature=draw(st.sampled_from((1.0, 0.0, 0.5, 2.0))),
        top_k=draw(st.sampled_from((2, 1, 3))) if "top-k" in filters else 0,
        top_p=draw(st.sampled_from((0.9, 0.5, 0.1))) if "top-p" in filters else 1.0,
        min_p=draw(st.sampled_from((0.1, 0.5))) if "min-p" in filters else 0.0,
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def _batches(draw: DrawFn) -> list[SampledRow]:
    size = draw(st.integers(2, 40))
    return draw(st.lists(_requests(size), min_size=1, max_size=5))


@st.composite
def _repeated(draw: DrawFn) -> list[SampledRow]:
    """Draw one request with many seeds: sooner or later it draws an unlikely token."""
    request = draw(_requests())
    first = draw(st.integers(0, 2**31))
    return [replace(request, seed=first + i) for i in range(_NUM_REPEATED)]


FILE = "generation_config.json"
MOST_TOKENS = 12
TOKENS = st.integers(0, 7)
"""Few different ones, so that they meet."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end tokens of a checkpoint, and the tokens of a request."""

    eos: int | tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def document(self) -> dict[str, Any]:
        """The content of generation_config.json."""
        return {"eos_token_id": self.eos if isinstance(self.eos, int) else list(self.eos)}

    @property
    def num_generated(self) -> int:
        """Tokens up to the first that ends the request, that one included."""
        ends = {self.eos} if isinstance(self.eos, int) else set(self.eos)
        return next((at + 1 for at, token in enumerate(self.token_ids) if token in ends), len(self.token_ids))


def check_stopping(named: Any, settings: Settings) -> Rejections:
    """Check where requests end under an `eos_token_id` that is a number or a list; nothing without `num_generated`.

    Raises:
        PropertyError: they end elsewhere.
    """
    target = OpsUnderTest(named)
    if not target.offers("num_generated") or target.declares("checkpoint") is None:
        return Rejections()
    with scratch_folder("harness-") as scratch:
        folder = scratch / "checkpoint"
        shutil.copytree(target.declares("checkpoint"), folder)
        return falsify(
            "a request ends with the first token that the checkpoint calls an end, whichever of them it is",
            lambda ending: _check(target, folder, ending),
            _endings(),
            settings,
        )


@st.composite
def _endings(draw: DrawFn) -> Ending:
    eos = draw(TOKENS | st.lists(TOKENS, min_size=1, max_size=3, unique=True).map(tuple))
    return Ending(eos, tuple(draw(st.lists(TOKENS, min_size=1, max_size=MOST_TOKENS))))


def _check(target: OpsUnderTest, folder: Path, ending: Ending) -> None:
    def program() -> str:
        lines = [
            "import json, shutil, tempfile",
            "from pathlib import Path",
            "",
            'folder = Path(tempfile.mkdtemp()) / "checkpoint"',
            "shutil.copytree(ops.checkpoint, folder)",
            f'(folder / "{FILE}").write_text(json.dumps({ending.document!r}))',
            f"assert ops.num_generated(folder, {list(ending.token_ids)!r}) == {ending.num_generated}",
        ]
        return "\n".join([*target.opening(), "", *lines]) + "\n"

    (folder / FILE).write_text(json.dumps(ending.document), encoding="utf-8")
    with calling("num_generated", program):
        num_generated = target.adapter.num_generated(folder, list(ending.token_ids))
    if num_generated != ending.num_generated:
        what = (
            f"of the tokens {list(ending.token_ids)} {num_generated} are generated, against {ending.num_generated}: "
            f"the end is {ending.document['eos_token_id']}"
        )
        raise Counterexample(what, program())


def check_tokenizer(named: Any, settings: Settings) -> Rejections:
    """Check that `decode` undoes `encode`, and that pieces of `detokenize` make up the whole; nothing without them.

    Raises:
        PropertyError: they do not.
    """
    target = OpsUnderTest(named)
    if not (target.offers("encode") and target.offers("decode")):
        return Rejections()
    alphabet = target.declares("alphabet")
    texts = st.text(max_size=40) if alphabet is None else st.text(alphabet, max_size=40)
    checks = {"a text that is encoded and decoded is the same": _check_text}
    if target.offers("detokenize"):
        checks["pieces of a text make up the whole"] = _check_pieces
    return raise_all(
        partial(falsify, sentence, partial(check, target), texts, settings) for sentence, check in checks.items()
    )


def _check_text(target: OpsUnderTest, text: str) -> None:
    def program() -> str:
        lines = [f"text = {text!r}", "assert ops.decode(ops.encode(text)) == text"]
        return "\n".join([*target.opening(), "", *lines]) + "\n"

    with calling("encode or decode", program):
        decoded = target.adapter.decode(target.adapter.encode(text))
    if decoded != text:
        raise Counterexample(f"{text!r} comes back as {decoded!r}", program())


def _check_pieces(target: OpsUnderTest, text: str) -> None:
    def program() -> str:
        lines = [f"tokens = ops.encode({text!r})", 'assert "".join(ops.detokenize(tokens)) == ops.decode(tokens)']
        return "\n".join([*target.opening(), "", *lines]) + "\n"

    with calling("detokenize", program):
        tokens = target.adapter.encode(text)
        pieces, expected = "".join(target.adapter.detokenize(tokens)), target.adapter.decode(tokens)
    if pieces != expected:
        raise Counterexample(f"the pieces make {pieces!r}, the whole is {expected!r}", program())
