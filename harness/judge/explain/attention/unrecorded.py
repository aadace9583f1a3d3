"""Mistakes of rotated queries and keys that were not recorded: they are seen through attention.

`R` rows, `N` query heads, `K` KV heads, `H` head size, `S` history rows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from harness.formats.taps import Kind
from harness.judge.compare.align import Rows
from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.core.fit import fit_by_search
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.judge.explain.rotary import ROTATED_WRONGLY, frequencies
from harness.judge.explain.rotary.positions import known_positions
from harness.oracle.rotation import Rotation, rotations

_PROBED_ROWS = 6
_GRID_OF_THETAS = [1e2 * math.exp(step / 10) for step in range(160)]
"""Bases from 100 to 900 million among which the best one is looked for."""


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """Queries and keys before and after their rotation, as failures of the rotation that show no error."""

    query: WrongOperation
    key: WrongOperation


def rotated_otherwise(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Whatever may be wrong with a rotation is wrong with that of queries and keys alike.

    Causes: where queries and keys were not recorded after their rotation: the causes of `rotary/` for both alike;
    rotary is not applied to queries, to keys; positions restart, run on, stop, or are off in decode; a fitted theta.
    """
    sides = _sides(wrong)
    for hypothesis in () if sides is None else _rotated(wrong, sides):
        yield replace(hypothesis, tap=wrong.operation.inputs[0])


def _rotated(wrong: WrongOperation, sides: _Sides) -> Iterator[Hypothesis]:
    for explain in ROTATED_WRONGLY:
        keys = {(item.cause, item.detail): item for item in explain(sides.key) if not item.num_fitted}
        for query in explain(sides.query):
            key = keys.get((query.cause, query.detail))
            if key is not None and not query.num_fitted:
                output = _attend(wrong, query.output, key.output)
                yield Hypothesis(cause=query.cause, output=output, detail=query.detail)
    right = sides.query.rotation
    if right is not None:
        yield from _of_one_side(wrong, sides, right)
        yield from _at_other_positions(wrong, sides, right)
        yield from _of_another_theta(wrong, sides, right)
        yield from _of_another_scaling(wrong, sides, right)


def _of_one_side(wrong: WrongOperation, sides: _Sides, right: Rotation) -> Iterator[Hypothesis]:
    query, key = sides.query.expected, sides.key.expected
    raw_query, raw_key = (item.inputs[0].flatten(1) for item in (sides.query, sides.key))
    yield Hypothesis(cause="rotary is not applied to queries", output=_attend(wrong, raw_query, key))
    yield Hypothesis(cause="rotary is not applied to keys", output=_attend(wrong, query, raw_key))


def _at_other_positions(wrong: WrongOperation, sides: _Sides, right: Rotation) -> Iterator[Hypothesis]:
    """Positions that other rows of the step, or of the request, have their share in; a common shift changes nothing."""
    highest = int(sides.key.positions.max())
    known = [known_positions(item) for item in (sides.query, sides.key)]
    tried = dict(zip(known[0], zip(*(item.values() for item in known), strict=True), strict=True))
    for n in range(1, highest + 1) if highest <= 512 else ():
        first = int(wrong.positions.min())
        if n == first:
            cause = f"positions begin at 0 again after {n - 1}: they are taken modulo {n}"
            tried[cause] = (sides.query.positions % n, sides.key.positions % n)
        if n == first - 1:
            cause = f"positions stop at {n}: rows after it are all rotated for it"
            tried[cause] = (sides.query.positions.clamp(max=n), sides.key.positions.clamp(max=n))
    told = [_relative(sides.query.positions, sides.key.positions)]
    for cause, (of_query, of_key) in tried.items():
        relative = _relative(of_query, of_key)
        if not bool(relative.any()) or any(torch.equal(relative, item) for item in told):
            continue  # no rotation at all, which has a name of its own, or one that nobody can tell apart
        told.append(relative)
        query, key = right.turn(sides.query.inputs[0], of_query), right.turn(sides.key.inputs[0], of_key)
        yield Hypothesis(cause=cause, output=_attend(wrong, query, key))


def _relative(of_query: torch.Tensor, of_key: torch.Tensor) -> torch.Tensor:
    positions = torch.cat((of_query, of_key))
    return positions - positions.min()


def _of_another_theta(wrong: WrongOperation, sides: _Sides, right: Rotation) -> Iterator[Hypothesis]:
    """The base of the frequencies, fitted to the rows that see farthest."""
    parameters = frequencies.rope_parameters(sides.query, right)
    if "rope_theta" not in parameters:
        return

    def of(theta: float) -> Rotation | None:
        return frequencies.with_parameters(sides.query, right, {**parameters, "rope_theta": theta})

    best = _best(wrong, sides, _GRID_OF_THETAS, of)
    fitted = None if best is None else float(f"{best:.6g}")
    changed = None if fitted is None else of(fitted)
    if changed is not None:
        cause = f"wrong rope theta: {float(f'{fitted:.3g}'):g} instead of {float(parameters['rope_theta']):g}"
        yield _of_rotation(wrong, sides, changed, cause, num_fitted=1)


def _of_another_scaling(wrong: WrongOperation, sides: _Sides, right: Rotation) -> Iterator[Hypothesis]:
    """Cosine and sine have another factor, which scales the scores by its square; it is no more than that to see."""
    if right.scaling != 1.0:
        plain = replace(right, scaling=1.0)
        cause = f"rope scaling: attention_factor is 1 instead of {right.scaling:.4g}"
        yield _of_rotation(wrong, sides, plain, cause)


def _of_rotation(
    wrong: WrongOperation, sides: _Sides, changed: Rotation, cause: str, num_fitted: int = 0
) -> Hypothesis:
    query, key = (changed.turn(item.inputs[0], item.positions) for item in (sides.query, sides.key))
    return Hypothesis(cause=cause, output=_attend(wrong, query, key), num_fitted=num_fitted)


def _best(
    wrong: WrongOperation, sides: _Sides, grid: list[float], of: Callable[[float], Rotation | None]
) -> float | None:
    """Return where on a grid, and then between its places, the rows that see farthest come out nearest."""
    view = max(wrong.views, key=lambda context: int(context.rows.position.max()))
    order = view.rows.position.argsort(descending=True)[:_PROBED_ROWS]
    rows = wrong.rows_of(view)[order]
    past = sum(len(item.key) for item in wrong.views[: wrong.views.index(view)])
    raw_key, positions = sides.key.inputs[0][past : past + len(view.key)], torch.arange(len(view.key))
    probe = view.select(order)

    def error(at: float) -> float:
        changed = of(at)
        if changed is None:
            return math.inf
        query = changed.turn(sides.query.inputs[0][rows], probe.rows.position).view_as(probe.query)
        key = changed.turn(raw_key, positions).view_as(view.key)
        return wrong.misfit(rows, replace(probe, query=query, key=key).attend())

    at = fit_by_search(grid, error)
    return at if math.isfinite(error(at)) else None


def rotated_though_none(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Rotary is applied, and this layer has none."""
    if _sides(wrong) is not None or not wrong.views:
        return
    key_positions = torch.cat([torch.arange(len(view.key)) for view in wrong.views])
    query, key = (torch.cat([getattr(view, name).flatten(1) for view in wrong.views]) for name in ("query", "key"))
    for right in rotations(wrong.hf, wrong.head_dim):
        if query.shape[1] % right.head_dim == 0 and key.shape[1] % right.head_dim == 0:
            turned = right.turn(query, wrong.positions), right.turn(key, key_positions)
            yield Hypothesis(cause="rotary is applied, and this layer has none", output=_attend(wrong, *turned))


def _attend(wrong: WrongOperation, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the context [R, N*H] of all views with other queries [R, N*H] and keys [all S, K*H]."""
    contexts = list[torch.Tensor]()
    row = past = 0
    for view in wrong.views:
        queries, history = query[row : row + len(view.rows)], key[past : past + len(view.key)]
        row, past = row + len(queries), past + len(history)
        contexts.append(replace(view, query=queries.view_as(view.query), key=history.view_as(view.key)).attend())
    return torch.cat(contexts)


def _sides(wrong: WrongOperation) -> _Sides | None:
    """Return queries and keys, if HF rotates them and the engine did not record them after that."""
    if wrong.rerun is None or not wrong.views:
        return None
    operations = [wrong.graph[tap] for tap in wrong.operation.inputs[:2]]
    if any(item.kind is not Kind.ROTARY or item.tap not in wrong.unrecorded for item in operations):
        return None
    rerun, made = wrong.rerun, list[WrongOperation]()
    rerun.run()
    places = rerun.places(wrong.rows)
    first = torch.cat([places[wrong.rows_of(view)[:1]] for view in wrong.views])
    begin = first - first % rerun.part_inputs.batch.num_tokens
    past = torch.cat([at + torch.arange(len(view.key)) for at, view in zip(begin, wrong.views, strict=True)])
    history = Rows.concat([_history(view) for view in wrong.views])
    for operation, rows, at in zip(operations, (wrong.rows, history), (places, past), strict=True):
        raw, turned = rerun.values.get(operation.inputs[0]), rerun.values.get(operation.tap)
        if raw is None or turned is None or bool((at < 0).any()):
            return None
        before, after = (x[at.to(x.device)].flatten(1).to("cpu", torch.float64) for x in (raw, turned))
        made.append(
            replace(
                wrong,
                operation=operation,
                rows=rows,
                inputs=[before],
                expected=after,
                actual=after,
                roundings=torch.zeros(len(rows), dtype=torch.float64),
                bound=torch.zeros(len(rows), dtype=torch.float64),
                views=(),
                downstream=None,
            )
        )
    sides = _Sides(query=made[0], key=made[1])
    return sides if sides.query.rotation is not None and sides.key.rotation is not None else None


def _history(view: AttentionContext) -> Rows:
    position = torch.arange(len(view.key))
    return Rows(
        request=torch.full_like(position, int(view.rows.request[0])), position=position, step=view.key_step.clamp(min=0)
    )
