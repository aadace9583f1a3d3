"""Metamorphic relations of a whole engine: ways to run the same requests that must not change what is computed."""

import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take

from harness.base.metrics import rounding_unit
from harness.errors import Code, HarnessError
from harness.properties.core.falsify import NamedAdapter, calling, falsify
from harness.properties.core.findings import Counterexample, Rejections
from harness.properties.engine.adapter import OPTIONAL, OPTIONS, Taps
from harness.properties.engine.case import (
    LONGEST_PROMPT,
    MOST_NEW_TOKENS,
    MOST_REQUESTS,
    RELATIONS,
    EngineCase,
    engine_cases,
    tap_program,
    token_program,
)
from harness.properties.engine.fresh import Answers, run_again

TAP_BOUNDS = {torch.float32: 3000.0, torch.bfloat16: 300.0, torch.float16: 300.0}
"""Roundings by which a row of a tap may differ between two ways to compute it, where the adapter says nothing. On three
models of three layers the reference engine reaches 293 in float32 (60 examples of every relation), and 43 in bfloat16
and 70 in float16 (20 examples)."""
TIE_BOUND = 10.0
"""Roundings of the norm of the logits within which two choices are equally good. The same runs reach 2.6."""
LOGITS = "lm_head"
NUM_AGAIN = 12
"""Cases of all relations together that run once more in a process of their own."""
LEAST_LIMIT_S, MOST_TIMES_LONGER = 60.0, 10
"""They may take so many seconds, and so many times as long as all examples here took. They are a few of these, and
libraries are loaded once more."""
MAX_MODEL_LEN = 48


def check_engine(factory: Any, settings: Settings, relation: str = "all") -> Rejections:
    """Run requests in the way of a relation instead of one by one, and compare tokens and taps.

    Raises:
        PropertyError: they differ.
        HarnessError: BAD_ADAPTER; ENGINE_TIMED_OUT in a process of its own; TRIGGER_NOT_REACHED where no example did
            what the relation is about; NOTHING_CHECKED where the adapter has taps and they are empty.
    """
    target = EngineUnderTest(factory)
    cases = engine_cases(
        relation, vocab_size=target.vocab_size, max_model_len=target.max_model_len, offered=target.offered
    )
    counter, count = RELATIONS[relation].counter, 0

    def check(case: EngineCase) -> None:
        nonlocal count
        count += target.check(case, counter)

    property, begin = f"what an engine computes does not depend on {RELATIONS[relation].what}", time.monotonic()
    rejections = falsify(property, check, cases, settings)
    if relation == "all" and target.passed:
        limit_s = round(LEAST_LIMIT_S + MOST_TIMES_LONGER * (time.monotonic() - begin))
        if why := run_again(target.adapter, target.passed, property, limit_s=limit_s):
            rejections[f"not run in a process of their own: {why}"] += len(target.passed)
    if "taps" in target.methods and not target.num_compared_rows:
        raise HarnessError(
            Code.NOTHING_CHECKED, "no row of any tap was there to be compared", where="--engine",
            expected="{name: {(index of the prompt, position): row}}", actual="no position of any prompt",
        )  # fmt: skip
    if counter in target.methods and not count:
        raise HarnessError(
            Code.TRIGGER_NOT_REACHED, f"no example had {RELATIONS[relation].what}", where="--engine",
            expected=f"{counter}() above 0", actual=0, hint="does the adapter pass its options on?",
        )  # fmt: skip
    return rejections


def refusal(factory: Any, relation: str) -> str | None:
    """Return why a relation cannot be checked of an engine; None if it can."""
    adapter = NamedAdapter.of(factory)
    missing = [option for option in RELATIONS[relation].options if not adapter.takes(option)]
    reasons: Mapping[str, str] = adapter.declares("refusals", {})
    if missing and missing[0] in reasons:
        return reasons[missing[0]]
    if missing and adapter.hides_parameters:
        return f"the constructor takes **kwargs; keywords does not name {missing[0]}"
    return f"the constructor has no parameter {missing[0]}" if missing else None


def not_checked(factory: Any) -> list[str]:
    """Name what is not checked of an engine, and why."""
    target = EngineUnderTest(factory)
    lines = [f"{RELATIONS[name].what}: {why}" for name in RELATIONS if (why := refusal(factory, name))]
    lines += [f"no {signature}" for method, signature in OPTIONAL.items() if method not in target.methods]
    counted = {RELATIONS[name].counter: RELATIONS[name].options for name in RELATIONS}
    seen = {option for counter, options in counted.items() if counter in target.methods for option in options}
    unseen = [option for option in OPTIONS if option in target.offered - seen]
    if unseen:
        lines.append(f"whether {', '.join(unseen)} have any effect: no method counts it")
    lines.append(
        f"more than {MOST_REQUESTS} requests, prompts of more than {LONGEST_PROMPT} tokens, and more than "
        f"{MOST_NEW_TOKENS} new ones"
    )
    lines.append("answers that are kept by prompt for longer than a process")
    return [f"engine: {line}" for line in lines]


class EngineUnderTest:
    """An engine's adapter, and what it computed for single requests on their own.

    Raises:
        HarnessError: BAD_ADAPTER: it lacks `generate` or `vocab_size`.
    """

    def __init__(self, factory: Any) -> None:
        self.adapter = NamedAdapter.of(factory)
        engine = self.adapter.target()
        if not callable(getattr(engine, "generate", None)) or not hasattr(engine, "vocab_size"):
            raise HarnessError(
                Code.BAD_ADAPTER, "the adapter lacks generate or vocab_size", where="--engine",
                expected="both", actual=type(engine).__name__, hint="docs/test-your-attention.md has a complete one",
            )  # fmt: skip
        self.vocab_size = int(engine.vocab_size)
        self.max_model_len = int(getattr(engine, "max_model_len", MAX_MODEL_LEN))
        self.tap_bound: float | None = getattr(engine, "tap_bound", None)
        self.num_compared_rows = 0
        self.offered = frozenset(name for name in OPTIONS if self.adapter.takes(name))
        self.methods = frozenset(name for name in OPTIONAL if callable(getattr(engine, name, None)))
        self.passed = list[tuple[EngineCase, Answers, Answers]]()
        """The latest cases that passed, with their tokens alone and in the changed way, in the case's order."""
        self._plain: dict[tuple[tuple[int, ...], int], tuple[list[int], Taps]] = {}

    def check(self, case: EngineCase, counter: str | None) -> int:
        """Compare a case with its requests one by one, and return what the counter counted.

        Raises:
            Counterexample: a token or a tap differs, or the engine raises.
        """
        plain = [self._alone(case, request) for request in range(len(case.prompts))]
        with calling("the engine", lambda: token_program(self.adapter, case)):
            engine = self.adapter.target(**case.options)
            if case.warm_up:
                engine.generate(case.warm_up, [1] * len(case.warm_up))
            tokens = engine.generate(
                [case.prompts[request] for request in case.order],
                [case.max_new_tokens[request] for request in case.order],
            )
        taps = self._taps(engine)
        for place, request in enumerate(case.order):
            self._compare(case, request, plain[request], list(tokens[place]), _of(taps, place))
        alone = [plain[request][0] for request in case.order]
        self.passed = [*self.passed, (case, alone, [list(row) for row in tokens])][-NUM_AGAIN:]
        return int(getattr(engine, counter)()) if counter in self.methods else 0

    def _alone(self, case: EngineCase, request: int) -> tuple[list[int], Taps]:
        key = case.prompts[request], case.max_new_tokens[request]
        if key not in self._plain:
            with calling("the engine", lambda: token_program(self.adapter, case)):
                engine = self.adapter.target()
                tokens = list(engine.generate([key[0]], [key[1]])[0])
            self._plain[key] = tokens, self._taps(engine)
        return self._plain[key]

    def _taps(self, engine: Any) -> Taps:
        return engine.taps() if "taps" in self.methods else {}

    def _compare(
        self,
        case: EngineCase,
        request: int,
        plain: tuple[list[int], Taps],
        tokens: list[int],
        taps: Mapping[str, Mapping[int, torch.Tensor]],
    ) -> None:
        plain_tokens, plain_taps = plain[0], _of(plain[1], 0)
        num_prompt = len(case.prompts[request])
        num_same = _first_difference(plain_tokens, tokens)
        # Rows before the first token that differs have equal inputs; those after it have not.
        last = num_prompt + len(plain_tokens) if num_same is None else num_prompt + num_same - 1
        self._compare_taps(case, request, plain_taps, taps, last)
        if num_same is not None and not self._is_tie(plain_taps, last, plain_tokens[num_same:], tokens[num_same:]):
            what = (
                f"request {request}, new token {num_same}: {tokens[num_same:][:1]}, alone {plain_tokens[num_same:][:1]}"
            )
            raise Counterexample(what, token_program(self.adapter, case))

    def _compare_taps(
        self,
        case: EngineCase,
        request: int,
        plain: Mapping[str, Mapping[int, torch.Tensor]],
        taps: Mapping[str, Mapping[int, torch.Tensor]],
        last: int,
    ) -> None:
        for name, rows in taps.items():
            positions = [position for position in rows if position <= last and position in plain.get(name, {})]
            if not positions:
                continue
            actual, expected = (torch.stack([x[p].flatten() for p in positions]) for x in (rows, plain[name]))
            difference = (actual.double() - expected.double()).norm(dim=-1)
            self.num_compared_rows += len(positions)
            unit, bound = rounding_unit(expected.dtype), self.tap_bound or TAP_BOUNDS[expected.dtype]
            error = torch.where(difference == 0, 0.0, difference / expected.double().norm(dim=-1) / unit)
            is_off = ~(error <= bound)
            if is_off.any():
                worst = int(is_off.nonzero()[0, 0])
                what = (
                    f"request {request}, position {positions[worst]}, {name}: {float(error[worst]):.3g} roundings "
                    f"from what it is alone, against a bound of {bound:g}"
                )
                place = case.order.index(request), positions[worst]
                raise Counterexample(what, tap_program(self.adapter, case, request, name, place, bound, unit))

    def _is_tie(
        self,
        plain: Mapping[str, Mapping[int, torch.Tensor]],
        position: int,
        expected: Sequence[int],
        actual: Sequence[int],
    ) -> bool:
        """Whether the logits of two choices are equal within rounding."""
        logits = plain.get(LOGITS, {}).get(position)
        if logits is None or not expected or not actual:
            return False
        row = logits.double()
        margin = float(row[expected[0]] - row[actual[0]])
        return margin <= TIE_BOUND * rounding_unit(logits.dtype) * float(row.norm())


def _first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or that only one list has; None if they are equal."""
    both = zip_longest(expected, actual)
    return next((i for i, (a, b) in enumerate(both) if a != b), None)


def _of(taps: Taps, place: int) -> dict[str, dict[int, torch.Tensor]]:
    """Return one request's rows by name and position."""
    return {
        name: {position: row for (index, position), row in rows.items() if index == place}
        for name, rows in taps.items()
    }
