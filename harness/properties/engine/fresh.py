"""Run cases once more in a process that has served no prompt before: an engine that keeps answers by prompt is seen.

In the process of the suite each request runs alone first. Whoever kept its answer then passes every relation, whatever
it would compute. The process here runs the cases in their changed way alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.engines.process import EngineProcess
from harness.engines.worker import serve
from harness.errors import Code, HarnessError
from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import PropertyError, PropertyFinding
from harness.properties.engine.case import EngineCase, expected_program

Answers = Sequence[Sequence[int]]
"""New tokens of the requests of a case, in the order in which they were added."""


class _FreshProcess(EngineProcess):
    module = "harness.properties.engine.fresh"


def run_again(
    adapter: NamedAdapter, passed: Sequence[tuple[EngineCase, Answers, Answers]], property: str, *, limit_s: float
) -> str | None:
    """Run cases in a new interpreter, and compare their tokens with those of each request alone, or changed, before.

    Args:
        adapter: what makes the engine.
        passed: cases, with the tokens of each request alone and in the changed way, which are equal but for ties.
        property: what should hold, in one sentence.
        limit_s: longest time in seconds for all cases.

    Returns:
        Why the cases could not be run; None if they were.

    Raises:
        PropertyError: a request has other tokens now.
        HarnessError: ENGINE_TIMED_OUT.
    """
    process = _FreshProcess(adapter.expression)
    question = {
        "imports": adapter.imports,
        "expression": adapter.expression,
        "cases": [_as_json(case) for case, _, _ in passed],
    }
    try:
        said = process.ask(question, doing="in a process that has served no prompt before", timeout_s=limit_s)
    except HarnessError as error:
        if error.code is Code.ENGINE_TIMED_OUT:
            raise HarnessError(
                error.code, error.what, where=error.where, expected=error.expected,
                hint="run the engine on the same prompts in a new process, without earlier ones",
            ) from error  # fmt: skip
        return error.what
    finally:
        process.close()
    if "why" in said:
        return str(said["why"])
    for (case, alone, changed), fresh in zip(passed, said["answers"], strict=True):
        for place, (request, *known) in enumerate(zip(case.order, alone, changed, strict=True)):
            row = fresh[place] if place < len(fresh) else None
            if row not in known:
                what = (
                    f"request {request}: {row} in a process that has served no prompt before, {known[0]} in "
                    "one that has: answers are kept"
                )
                expected = expected_program(adapter, case, [list(tokens) for tokens in alone])
                raise PropertyError(PropertyFinding(property=property, what=what, program=expected))
    return None


def _as_json(case: EngineCase) -> dict[str, object]:
    return {
        "options": dict(case.options),
        "warm_up": case.warm_up,
        "prompts": [case.prompts[request] for request in case.order],
        "max_new_tokens": [case.max_new_tokens[request] for request in case.order],
    }


def main() -> None:
    """Answer questions on standard input: the new tokens of cases."""
    serve(_answer)


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    try:
        exec("\n".join(question["imports"]), scope)  # the user's program, as a counterexample shows it
        make = eval(question["expression"], scope)
        return {"answers": [_tokens(make, case) for case in question["cases"]]}
    except Exception as error:  # whatever an engine raises
        return {"why": f"{type(error).__name__}: {error}"}


def _tokens(make: Any, case: Mapping[str, Any]) -> list[list[int]]:
    engine = make(**case["options"])
    if case["warm_up"]:
        engine.generate(case["warm_up"], [1] * len(case["warm_up"]))
    return [[int(token) for token in row] for row in engine.generate(case["prompts"], case["max_new_tokens"])]
