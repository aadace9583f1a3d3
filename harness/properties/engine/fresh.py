"""Run cases once more in a process that has served no prompt before: an engine that keeps answers by prompt is seen.

In the process of the suite each request runs alone first. Whoever kept its answer then passes every relation, whatever
it would compute. The process here runs the cases in their changed way alone.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.base.files import scratch_folder
from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import PropertyError, PropertyFinding
from harness.properties.engine.case import EngineCase, expected_program

_LOOP = """
import json, sys
answers = []
for case in json.loads(sys.argv[1]):
    engine = {expression}(**case["options"])
    if case["warm_up"]:
        engine.generate(case["warm_up"], [1] * len(case["warm_up"]))
    answers.append([[int(token) for token in row] for row in engine.generate(case["prompts"], case["max_new_tokens"])])
with open(sys.argv[2], "w") as file:
    json.dump(answers, file)
"""
Answers = Sequence[Sequence[int]]
"""New tokens of the requests of a case, in the order in which they were added."""


def run_again(
    adapter: NamedAdapter, passed: Sequence[tuple[EngineCase, Answers, Answers]], property: str
) -> str | None:
    """Run cases in a new interpreter, and compare their tokens with those of each request alone, or changed, before.

    Args:
        adapter: what makes the engine.
        passed: cases, with the tokens of each request alone and in the changed way, which are equal but for ties.
        property: what should hold, in one sentence.

    Returns:
        Why the cases could not be run; None if they were.

    Raises:
        PropertyError: a request has other tokens now.
    """
    program = "\n".join([*adapter.imports, _LOOP.format(expression=adapter.expression)])
    with scratch_folder("harness-") as folder:
        out = folder / "answers.json"
        cases = json.dumps([_as_json(case) for case, _, _ in passed])
        path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        ran = subprocess.run(
            [sys.executable, "-c", program, cases, str(out)], env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        if ran.returncode or not out.is_file():
            return (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        answers = json.loads(out.read_text())
    for (case, alone, changed), fresh in zip(passed, answers, strict=True):
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
