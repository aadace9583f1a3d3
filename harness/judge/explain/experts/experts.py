"""A mixture of experts is wrong: other experts, other weights of them, one wrong expert, or the shared expert."""

from collections.abc import Iterator, Mapping
from itertools import permutations

import torch

from harness.judge.compare.evidence import MAX_ROWS
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation, hypotheses
from harness.judge.explain.experts.mixture import (
    Mixture,
    experts_of,
    mixture_of,
    others_like,
    recorded_choices,
)
from harness.oracle.experts import one_expert, run_experts

_MAX_ORDERED = 4
"""Experts of a row up to which every order of their weights is tried."""
_ABSENT = 0.5
"""Share of its weight below which an expert was left out of a row."""
_NEAR = 0.1
"""Share of its weights' energy up to which an expert's weights may be off and still be its own."""
_NOTHING = 1e-2
"""Factor below which an output counts as left out."""
_CHANCE = 1e-4
"""Probability below which it is no chance that all wrong rows chose one expert."""
_MOST = 0.5
"""Share of the rows of a wrong expert that are wrong, at least: where its weight is small, rounding hides it."""
_OFTEN = 0.25
"""Share of the rows of an expert that may be right though its output is lost: where its weight is small."""


def wrong_experts(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Each expert is right, and others were mixed, or with other weights; or the experts are wrong, or one of them.

    Causes: experts *n* and *n* are swapped; the numbers of the experts are off by *n*; in another order; the output of
    experts *n*, ... is not added; only the first of the chosen experts is added; added without the router's weights,
    with each other's, twice, or on the input (on the output, where they belong on the input); each expert's output is
    written over those before it; the experts, or one of them, are those of another layer or expert; the output of
    expert *n* is scaled by *value*; expert *n* is another than that of the checkpoint (all wrong rows chose it, and by
    no chance). Not asserted: some rows lack the output of experts that they chose.
    """
    mixture = mixture_of(wrong)
    if mixture is None:
        return
    expert = _only_expert(mixture)
    used = mixture.weights_used()
    if used is not None:
        yield from _other_experts(mixture, used)
        yield from _left_out(mixture, used)
    if expert is not None:
        yield from _one_otherwise(mixture, expert)
        return  # what concerns all rows would show in those of other experts
    yield from _weights_otherwise(mixture) if mixture.scores is None else _scores_otherwise(mixture, mixture.scores)
    for operation in others_like(wrong):
        with wrong.hf.exactly(operation.module):
            output = mixture.run(experts_of(wrong, operation))
        yield Hypothesis(cause=f"the experts are those of {operation.tap}", output=output)


def _weights_otherwise(mixture: Mixture) -> Iterator[Hypothesis]:
    """Other weights than the router's, or fewer experts; or the weights are where they do not belong."""
    weights_RC, count = mixture.weights, mixture.weights.shape[1]
    total = weights_RC.sum(dim=1, keepdim=True)
    tried = {
        "the experts' outputs are added without the router's weights": torch.ones_like(weights_RC),
        "the experts' outputs are averaged, without the router's weights": torch.full_like(weights_RC, 1 / count),
        "the router's weights are applied twice": weights_RC.square(),
        "the router's weights are normalised to a sum of one before the experts' outputs are added": weights_RC / total,
        "every expert of a row is given the weight of the first": weights_RC[:, :1].expand_as(weights_RC),
    }
    for order in list(permutations(range(count)))[1:] if count <= _MAX_ORDERED else ():
        cause = f"the experts of a row are given each other's weights, in the order {list(order)}"
        tried[cause] = weights_RC[:, order]
    if count > 1:
        cause = "each expert's output is written over those before it: only the expert with the highest number is added"
        tried[cause] = weights_RC * (mixture.chosen == mixture.chosen.amax(dim=1, keepdim=True))
    for kept in range(1, count):
        whose = "the first of the chosen experts" if kept == 1 else f"the first {kept} of the chosen experts"
        first = weights_RC * (torch.arange(count) < kept)
        tried[f"only {whose} is added"] = first
        tried[f"only {whose} is added, with weights that are normalised again"] = first / first.sum(1, keepdim=True)
    yield from hypotheses({cause: mixture.mixed(mixture.spread(weights)) for cause, weights in tried.items()})
    with mixture.wrong.hf.exactly():
        parts = [
            run_experts(
                mixture.module, mixture.x * weights_RC[:, [at]], mixture.chosen[:, [at]], torch.ones_like(total)
            )
            for at in range(count)
        ]
    cause = "the router's weights are applied to the experts' input instead of their output"
    yield Hypothesis(cause=cause, output=torch.stack(parts).sum(dim=0))


def _scores_otherwise(mixture: Mixture, scores: torch.Tensor) -> Iterator[Hypothesis]:
    """The router's scores, which belong to the experts' input, are used otherwise; or one side of the sum is missing.

    Args:
        mixture: of experts whose input is multiplied.
        scores: [R, 1].
    """
    plain, base = mixture.x / scores, mixture.base

    def added(x: torch.Tensor) -> torch.Tensor:
        return run_experts(mixture.module, x, mixture.chosen, mixture.weights)

    with mixture.wrong.hf.exactly():
        experts, of_plain = added(mixture.x), added(plain)
        tried = {
            "the experts' outputs are added without the router's weights": base + of_plain,
            "the router's weights are applied to the experts' output instead of their input": base + of_plain * scores,
            "the router's weights are applied to the experts' input and to their output": base + experts * scores,
            "the router's weights are applied twice": base + added(mixture.x * scores),
        }
    tried |= {"the shared expert is not added": experts, "the routed experts are not added": base}
    yield from hypotheses(tried)


def _other_experts(mixture: Mixture, used: torch.Tensor) -> Iterator[Hypothesis]:
    """The outputs of an expert stand where those of another should."""
    meant = mixture.table
    sources = ((at, _source(meant[:, at], used, at)) for at in range(mixture.num_experts))
    moved = {at: to for at, to in sources if at != to}
    exchanged = {at: to for at, to in moved.items() if moved.get(to) == at}
    for item in (moved, exchanged if exchanged != moved else {}):
        if item:
            source = torch.tensor([item.get(at, at) for at in range(mixture.num_experts)])
            table = torch.zeros_like(meant).index_add_(1, source, meant)
            yield Hypothesis(cause=_moved(item, mixture.num_experts), output=mixture.mixed(table), num_fitted=len(item))


def _source(meant: torch.Tensor, used: torch.Tensor, expert: int) -> int:
    """Return the expert whose weights in the rows that chose `expert` are nearest to those that it should have."""
    rows = meant > 0
    if not bool(rows.any()):
        return expert
    distance = (used[rows] - meant[rows, None]).square().sum(dim=0)
    is_own = bool(distance[expert] < _NEAR * meant[rows].square().sum())
    return expert if is_own else int(distance.argmin())


def _moved(moved: Mapping[int, int], count: int) -> str:
    """Say which experts stand in the place of which."""
    first, second = next(iter(moved.items()))
    shifts = {(to - at) % count for at, to in moved.items()}
    if len(moved) == 1:
        return f"expert {first} is computed with the weights of expert {second}"
    if len(moved) == 2 and moved.get(second) == first:
        return f"experts {first} and {second} are swapped"
    if len(shifts) == 1:
        return f"the numbers of the experts are off by {(second - first + count // 2) % count - count // 2:+d}"
    pairs = ", ".join(f"{to} for {at}" for at, to in list(moved.items())[:8])
    return f"the experts are in another order: {pairs}"


def _left_out(mixture: Mixture, used: torch.Tensor) -> Iterator[Hypothesis]:
    """The outputs of some experts are not added."""
    meant = mixture.table
    is_out = (meant > 0) & (used < _ABSENT * meant)
    recorded = recorded_choices(mixture)
    always = [at for at in range(mixture.num_experts) if bool((meant[:, at] > 0).any())]
    always = [at for at in always if bool(is_out[meant[:, at] > 0, at].all())]
    always = [at for at in always if recorded is not None and not _is_often_right(mixture, at, recorded)]
    if always:
        table = meant.clone()
        table[:, always] = 0
        which = f"expert {always[0]}" if len(always) == 1 else f"experts {', '.join(map(str, always))}"
        yield Hypothesis(cause=f"the output of {which} is not added", output=mixture.mixed(table))
    if bool(is_out.any()):
        yield Hypothesis(
            cause="some rows lack the output of experts that they chose, as under a limited capacity",
            output=mixture.mixed(meant.masked_fill(is_out, 0)),
            num_fitted=int(is_out.sum()),
            is_cause=False,
        )


def _one_otherwise(mixture: Mixture, expert: int) -> Iterator[Hypothesis]:
    """One expert is that of another layer, or has the weights of another, or its output is scaled."""
    wrong, weight = mixture.wrong, mixture.table[:, expert, None]
    for operation in others_like(wrong):
        with wrong.hf.exactly(operation.module):
            part = one_expert(experts_of(wrong, operation), mixture.x, expert)
        cause = f"the weights of expert {expert} are those of expert {expert} of {operation.tap}"
        yield Hypothesis(cause=cause, output=mixture.with_part_of(expert, part))
    for replacement, part in enumerate(mixture.outputs):
        if replacement != expert:
            cause = _moved({expert: replacement}, mixture.num_experts)
            yield Hypothesis(cause=cause, output=mixture.with_part_of(expert, part), num_fitted=1)
    part = weight * mixture.outputs[expert]
    factor = 1 + wrong.factor_of(part, wrong.expected)
    if abs(factor) > _NOTHING:
        cause = f"the output of expert {expert} is scaled by {factor:.4g}"
        yield Hypothesis(cause=cause, output=wrong.expected + (factor - 1) * part, num_fitted=1)
    count = int(mixture.rows_of(expert).sum())
    yield Hypothesis(
        cause=f"expert {expert} is another than that of the checkpoint: other weights, or not all of them",
        detail=f"each of the {count} wrong rows that were looked at chose it",
        output=wrong.actual,
        is_fallback=True,
    )


def _is_often_right(mixture: Mixture, expert: int, recorded: torch.Tensor) -> bool:
    """Whether many rows chose an expert and are right all the same: then it is not lost, whatever happens to it.

    Args:
        mixture: at the wrong rows.
        expert: in question.
        recorded: [rows, C], the experts of every row.
    """
    num_rows, num_wrong = int((recorded == expert).any(dim=1).sum()), int(mixture.rows_of(expert).sum())
    return len(mixture.chosen) < MAX_ROWS and num_rows - num_wrong > _OFTEN * num_rows


def _only_expert(mixture: Mixture) -> int | None:
    """Return the expert that all wrong rows chose, and that hardly any right row did; None if that could be chance.

    Rows of other experts are right, so its own computation is at fault, whatever that is.
    """
    recorded = recorded_choices(mixture)
    if recorded is None:
        return None
    num_wrong, suspects = len(mixture.chosen), list[int]()
    for expert in mixture.chosen[0].tolist():
        num_rows = int((recorded == expert).any(dim=1).sum())
        is_always = bool(mixture.rows_of(expert).all())
        is_chance = (num_rows / len(recorded)) ** num_wrong > _CHANCE
        is_most = num_wrong >= min(_MOST * num_rows, MAX_ROWS)
        if is_always and is_most and not is_chance:
            suspects.append(expert)
    return suspects[0] if len(suspects) == 1 else None
