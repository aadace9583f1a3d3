"""A finding about a whole engine as a program, with the engine's adapter in it and nothing else."""

from harness.properties.core.adapter import NamedAdapter
from harness.properties.engine.case import EngineCase


def token_program(adapter: NamedAdapter, case: EngineCase) -> str:
    """Return a program that asserts that the tokens of all requests are those of each alone."""
    name = adapter.expression
    alone = f"plain = [{name}().generate([prompt], [n])[0] for prompt, n in zip(prompts, max_new_tokens)]"
    is_sorted = list(case.order) == sorted(case.order)
    expected = "plain" if is_sorted else f"[plain[i] for i in {list(case.order)}]"
    lines = [*_opening(adapter, case), alone, *_running(adapter, case)]
    return "\n".join([*lines, f"assert [list(own) for own in changed] == [list(own) for own in {expected}]"]) + "\n"


def tap_program(
    adapter: NamedAdapter, case: EngineCase, request: int, tap: str, place: tuple[int, int], bound: float, unit: float
) -> str:
    """Return a program that asserts that one row of a tap is what it is alone; `place` is its key among the taps."""
    lines = [
        *_opening(adapter, case),
        *_running(adapter, case),
        f"alone = {adapter.expression}()",
        f"alone.generate([prompts[{request}]], [max_new_tokens[{request}]])",
        f'expected = alone.taps()["{tap}"][0, {place[1]}].double()',
        f'actual = engine.taps()["{tap}"][{place[0]}, {place[1]}].double()',
        f"error = (actual - expected).norm() / expected.norm() / {unit:.4g}",
        'print(f"{error:.3g} roundings")',
        f"assert error <= {bound:g}",
    ]
    return "\n".join(lines) + "\n"


def _opening(adapter: NamedAdapter, case: EngineCase) -> list[str]:
    prompts = [list(prompt) for prompt in case.prompts]
    return [
        *adapter.imports,
        "",
        f"prompts, max_new_tokens = {prompts}, {list(case.max_new_tokens)}",
    ]


def _running(adapter: NamedAdapter, case: EngineCase) -> list[str]:
    options = ", ".join(f"{name}={value!r}" for name, value in case.options.items())
    lines = [f"engine = {adapter.expression}({options})"]
    if case.warm_up:
        warm_up = [list(prompt) for prompt in case.warm_up]
        lines += [f"engine.generate({warm_up}, {[1] * len(warm_up)})"]
    if list(case.order) == sorted(case.order):
        return [*lines, "changed = engine.generate(prompts, max_new_tokens)"]
    order = list(case.order)
    ordered = [f"[{values}[i] for i in {order}]" for values in ("prompts", "max_new_tokens")]
    return [*lines, f"changed = engine.generate({', '.join(ordered)})"]
