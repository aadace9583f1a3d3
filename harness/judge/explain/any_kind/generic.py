"""Causes that fit any operation: a gain, rows or heads in another order, another input, a coarser dtype."""

import math
from collections.abc import Callable, Iterator

import torch

from harness.base.metrics import largest_rounding, rounding_unit
from harness.formats.taps import KINDS, Kind, Operation
from harness.judge.compare.align import Rows, is_readback, step_rows
from harness.judge.explain.core.formats import HALF_DTYPES, cut_off, name_of, rounded
from harness.judge.explain.core.rerun import is_same, replay
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation, gathered, row_inputs
from harness.judge.explain.norms import form_of

_MAX_POOL_ROWS = 4096
"""Rows among which a wrong one is looked for."""
_COARSE_DTYPES = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
_MAX_ELEMENTS = 4096
"""Of a row, whose order is looked for."""
_MANY, _FEW = 32, 0.05
"""Elements that show whether they were cut off, and the share of them that may be otherwise."""
_SAME_GAIN = 1e-3
"""Relative distance up to which a gain is the number that it is taken for."""
_OF_LOGITS, _OF_EMBEDDING = ("logit", "head", "output"), ("embed", "emb_", "_emb", "hidden")
"""Words in the names of multipliers of logits, and of embeddings."""
_NO_MULTIPLIERS = ("eps", "dropout", "theta", "range", "std", "rope", "aux", "jitter", "cap")
_FEW_ROWS = 4
"""Right rows that can contradict a cause, at least."""
_ROW_WISE = (Kind.NORM, Kind.LINEAR, Kind.ROTARY)


def zero_output(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The output is zero: not computed, or not loaded."""
    yield Hypothesis(cause="the output is zero: not computed, or not loaded", output=torch.zeros_like(wrong.expected))


def constant_gain(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """All rows are scaled by one factor; a factor of its own in each row is no cause.

    Causes: a constant gain of *value*. Not asserted: each row is scaled by a factor of its own.
    """
    gain = wrong.factor_of(wrong.expected)
    energy = wrong.expected.square().sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    gains = (wrong.actual * wrong.expected).sum(dim=1, keepdim=True) / energy
    if f"{gain:.6g}" == "1":
        return
    if _is_one(wrong, wrong.expected * gain, wrong.expected * gains):
        yield Hypothesis(
            cause=f"a constant gain of {gain:.6g}",
            output=wrong.expected * gain,
            num_fitted=1,
            allowance=1.0,
            is_cause=not (_is_contradicted(wrong, lambda expected: expected * gain) or _may_be_eps(wrong)),
        )
    else:
        yield Hypothesis(
            cause="each row is scaled by a factor of its own",
            output=wrong.expected * gains,
            detail=f"from {float(gains.min()):.6g} to {float(gains.max()):.6g}",
            num_fitted=len(gains),
            is_cause=False,
        )


def gain_of_a_setting(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The rows are scaled by a number of config.json, or by one over it: a multiplier left out, or applied twice.

    Causes: *name of config.json* is left out, or applied twice: a constant gain of *value*.
    """
    gain, input_gain = wrong.factor_of(wrong.expected), _gain_of_input(wrong)
    for name, value in _multipliers(wrong):
        for factor in (value, 1 / value):
            if math.isclose(factor, gain, rel_tol=_SAME_GAIN):
                if input_gain is None or not math.isclose(
                    abs(math.log(input_gain)), abs(math.log(value)), rel_tol=1e-3
                ):
                    how = "left out, or applied once too often"
                else:
                    how = "left out" if factor * input_gain < 1.5 and factor * input_gain > 2 / 3 else "applied twice"
                cause = f"{name} ({value:g}) is {how}: a constant gain of {factor:.6g}"
                output = wrong.expected * factor
                yield Hypothesis(
                    cause=cause,
                    output=output,
                    is_cause=not _is_contradicted(wrong, lambda expected, factor=factor: expected * factor),  # type: ignore[misc]
                )


def _multipliers(wrong: WrongOperation) -> Iterator[tuple[str, float]]:
    """Yield the numbers of the config that the operation may be multiplied by; names of one number together."""
    config, names_of = wrong.config, dict[float, list[str]]()
    named = {**vars(config), "the root of the hidden size": float(getattr(config, "hidden_size", 1)) ** 0.5}
    for name, value in named.items():
        is_named = "scal" in name or "mult" in name
        is_number = isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and is_named)
        if is_number and value > 0 and value != 1 and _may_scale(wrong, name):
            names_of.setdefault(float(value), []).append(name)
    yield from ((" or ".join(names), value) for value, names in names_of.items())


def _may_scale(wrong: WrongOperation, name: str) -> bool:
    """Whether a number of the config may belong to an operation, going by their names."""
    is_of_logits, is_of_embedding = (any(word in name for word in words) for words in (_OF_LOGITS, _OF_EMBEDDING))
    if any(word in name for word in _NO_MULTIPLIERS):
        return False
    if wrong.operation.layer is None:
        return is_of_embedding if wrong.operation.kind is Kind.EMBEDDING else is_of_logits
    return not is_of_logits and (not is_of_embedding or wrong.operation.site == "input")


def _gain_of_input(wrong: WrongOperation) -> float | None:
    """Return the factor by which what should be is the operation's only input; None if it is something else."""
    if len(wrong.inputs) != 1 or not wrong.inputs[0].is_floating_point():  # token ids are no factor of anything
        return None
    x = wrong.inputs[0].flatten(1)
    if x.shape != wrong.expected.shape:
        return None
    factor = float((wrong.expected * x).sum() / x.square().sum().clamp(min=torch.finfo(torch.float64).tiny))
    return factor if factor > 0 and wrong.is_expected(x * factor) else None


def _may_be_eps(wrong: WrongOperation) -> bool:
    """Whether the operation is a norm of no known form: its eps could not be tried, and looks like a gain."""
    return wrong.operation.kind is Kind.NORM and form_of(wrong) is None


def _is_one(wrong: WrongOperation, together: torch.Tensor, apart: torch.Tensor) -> bool:
    """Whether one number for all rows does as well as one for each, which costs what the BIC says."""
    left, least = ((wrong.actual - item).norm(dim=1) / item.norm(dim=1) for item in (together, apart))
    finest = rounding_unit(wrong.dtype) / 2
    count = len(left) * wrong.num_elements / 4
    gained = count * float((left.clamp(min=finest).log() - least.clamp(min=finest).log()).nan_to_num().mean())
    return gained <= len(left) / 2 * math.log(max(count, math.e))


def offset_per_channel(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The same vector is added to all rows.

    Causes: a constant offset per channel.
    """
    if len(wrong.rows) > 1:
        offset = (wrong.actual - wrong.expected).mean(dim=0)
        norm = float(offset.norm())
        yield Hypothesis(
            cause=f"a constant offset per channel, norm {norm:.3g}",
            output=wrong.expected + offset,
            num_fitted=round(wrong.num_elements),
            allowance=1.0,
            is_cause=not _is_contradicted(wrong, lambda expected: expected + offset),
        )


def _is_contradicted(wrong: WrongOperation, change: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a change that spares no row would make the right rows worse, of the same requests and steps.

    Rows are wrong where an error that grows, with the position for one, has left its bound: of these alone, any error
    that lasts looks constant.
    """
    rows = _right_rows(wrong)
    if len(rows) < _FEW_ROWS:
        return False
    inputs = row_inputs(wrong.locator, wrong.operation, rows)
    expected = None if inputs is None else wrong.replay([x.flatten(1) for x in inputs], rows.position)
    actual = gathered(wrong.locator, wrong.operation.tap, rows)
    if expected is None or actual is None or actual.shape != expected.shape:
        return False
    before, after = ((actual - item).norm(dim=1) for item in (expected, change(expected)))
    return float((after > before).double().mean()) > 1 / 2


def _right_rows(wrong: WrongOperation) -> Rows:
    """Return the rows of the wrong rows' requests and steps that are not among them."""
    if not wrong.operation.inputs:
        return wrong.rows.select(torch.arange(0))
    rows = _pool_rows(wrong)
    wrong_places = set(wrong.rows.places())
    near = {(request, step) for request, _, step in wrong.rows.identities()}
    keep = [
        (request, step) in near and (request, position) not in wrong_places
        for request, position, step in rows.identities()
    ]
    return rows.select(torch.tensor(keep, dtype=torch.bool).nonzero()[:, 0])


def row_of_another(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The row is that of another token, *n* positions away, the first or last one of its step."""
    if wrong.operation.kind not in (*_ROW_WISE, Kind.ACTIVATION, Kind.ADD):
        return
    pool_rows = _pool_rows(wrong)
    inputs = row_inputs(wrong.locator, wrong.operation, pool_rows) if len(pool_rows) else None
    pool = None if inputs is None else wrong.replay(inputs, pool_rows.position)
    if pool is None and wrong.rerun is not None:  # a rotation of no known form, for one: as HF's code gives it
        pool_rows, pool = wrong.rerun.rows, wrong.rerun.run()
        if not is_same(pool[wrong.rerun.places(wrong.rows)], wrong.expected):
            return
    if pool is None:
        return
    yield from _rows_of_the_step(wrong, pool_rows, pool)
    source = torch.cdist(wrong.actual, pool).argmin(dim=1)
    sources = pool_rows.select(source)
    pairs = [
        f"request {r}, position {p} holds that of request {source_request}, position {at}"
        for (r, p), (source_request, at) in zip(wrong.rows.places(), sources.places(), strict=True)
    ]
    shift = (sources.position - wrong.positions).unique()
    is_own = bool((sources.request == wrong.rows.request).all())
    which = f"{int(shift):+d} positions away" if is_own and len(shift) == 1 else "elsewhere"
    yield Hypothesis(
        cause=f"the row is that of another token, {which}",
        output=pool[source],
        detail="; ".join(pairs[:3]),
        num_fitted=1 if is_own and len(shift) == 1 else len(source),
    )


def _rows_of_the_step(wrong: WrongOperation, pool_rows: Rows, pool: torch.Tensor) -> Iterator[Hypothesis]:
    """Each row is the first or the last one of its step."""
    for name, pick in (("first", 0), ("last", -1)):
        places = [(pool_rows.step == step).nonzero()[:, 0] for step in wrong.rows.step.tolist()]
        if all(len(here) for here in places):
            source = torch.stack([here[pick] for here in places])
            cause = f"the row is that of another token, the {name} one of its step"
            yield Hypothesis(cause=cause, output=pool[source])


def _pool_rows(wrong: WrongOperation) -> Rows:
    """Rows that the operation's inputs were recorded at, those of the wrong rows' own steps first."""
    steps_of_wrong_rows = set(wrong.rows.step.tolist())
    source = wrong.operation.inputs[0] if wrong.operation.inputs else wrong.operation.tap
    steps = [step for step in wrong.recording.steps if not is_readback(step) and step.has(source)]
    steps.sort(key=lambda step: step.index not in steps_of_wrong_rows)
    rows = Rows.concat([step_rows(step, source) for step in steps])
    return rows.select(torch.arange(min(len(rows), _MAX_POOL_ROWS)))


def heads_in_another_order(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The heads, or their elements, are in another order, or exchanged; heads *list* are zero: not written, or lost."""
    head_dim, kind = wrong.head_dim, wrong.operation.kind
    if not (KINDS[kind].has_heads or kind is Kind.CACHE) or wrong.expected.shape[1] % head_dim:
        return
    by_element = torch.arange(wrong.expected.shape[1]).view(-1, head_dim).T.flatten()
    for size, what in ((head_dim, "heads"), (1, "elements")):
        actual, expected = (
            x.unflatten(1, (-1, size)).transpose(0, 1).flatten(1) for x in (wrong.actual, wrong.expected)
        )
        count, pool = len(expected), torch.cat((expected, torch.zeros_like(expected[:1])))
        if size == 1 and (len(wrong.rows) < 2 or count > _MAX_ELEMENTS):
            return  # one row fits by chance
        source = torch.cdist(actual, pool).argmin(dim=1)
        lost = (source == count).nonzero()[:, 0].tolist()
        num_runs = 1 + int((source.diff() != 1).sum())
        if size == 1 < count // head_dim and torch.equal(source, by_element):
            cause = (
                "heads and elements of a row are exchanged: it is written as [heads, elements] and read as the reverse"
            )
            yield Hypothesis(cause=cause, output=wrong.expected[:, source])
        elif num_runs > 1:
            order = str(source.tolist()) if size > 1 else f"{num_runs} runs of them"
            moved = f"the {what} are in another order: {order}"
            cause = f"{what} {lost[:8]} are zero: not written, or lost" if lost else moved
            output = pool[source].unflatten(1, (-1, size)).transpose(0, 1).flatten(1)
            yield Hypothesis(cause=cause, output=output, num_fitted=num_runs if lost or size == 1 else 0)


def another_input(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """It reads *tap* instead of *tap*; or *norm* of *tap*, as where a norm stands before a block and not behind it."""
    if wrong.operation.kind not in _ROW_WISE or not wrong.can_replay:
        return
    x, operation = wrong.inputs[0].flatten(1), wrong.graph[wrong.operation.inputs[0]]
    read = name_near(wrong, operation)
    tensors: dict[str, torch.Tensor | None] = dict(other_taps(wrong, x.shape))
    tensors.pop(read, None)
    for norm in wrong.graph.of_layer(wrong.operation.layer):
        if norm.kind is Kind.NORM and norm.tap not in (operation.tap, wrong.operation.tap):
            tensors[f"{norm.site} of {read}"] = replay(wrong.hf, norm, [x])
    for name, tensor in tensors.items():
        output = None if tensor is None or tensor.shape != x.shape else wrong.replay([tensor], wrong.positions)
        if output is not None:
            yield Hypothesis(cause=f"it reads {name} instead of {read}", output=output)


def another_output(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The rows are those of another tap, as if the operation had been left out.

    Causes: the output is that of *tap*; the gate of *tap* is left out: the output is that of *tap*.
    """
    sites = [wrong.graph[tap].site for tap in wrong.operation.inputs]
    for name, tensor in other_taps(wrong, wrong.actual.shape):
        is_gated = wrong.operation.kind is Kind.ACTIVATION and len(sites) > 1 and name in sites
        lost = " and ".join(site for site in sites if site != name)
        cause = f"the gate of {lost} is left out: " if is_gated else ""
        yield Hypothesis(cause=f"{cause}the output is that of {name}", output=tensor, num_fitted=1)


def other_taps(wrong: WrongOperation, shape: torch.Size) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and rows of other taps of the layer, or of the one before, but of none that is computed from it."""
    later = {wrong.operation.tap}
    for operation in wrong.graph:
        if later & set(operation.inputs):
            later.add(operation.tap)
        if operation.tap in later or operation.is_kept:
            continue
        if _is_near(wrong, operation):
            tensor = wrong.tap(operation.tap)
            if tensor is not None and tensor.shape == shape:
                yield name_near(wrong, operation), tensor


def _is_near(wrong: WrongOperation, operation: Operation) -> bool:
    """Whether an operation belongs to the same layer or the one before; for what has no layer, whether it ends one."""
    if operation.layer is None:
        return True
    if wrong.operation.layer is None:
        return operation.tap == list(wrong.graph.of_layer(operation.layer))[-1].tap
    return wrong.operation.layer - 1 <= operation.layer <= wrong.operation.layer


def name_near(wrong: WrongOperation, operation: Operation) -> str:
    """Return the name of another operation in a cause: its tap, or its site if it is of the same layer."""
    return operation.site if operation.layer == wrong.operation.layer else operation.tap


def rounded_output(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The output is rounded to *dtype*; the output is cut off to *dtype* instead of rounded."""
    for dtype in _COARSE_DTYPES:
        if rounding_unit(dtype) <= rounding_unit(wrong.dtype) or not torch.equal(
            rounded(wrong.actual, dtype), wrong.actual
        ):
            continue
        error = (wrong.actual - wrong.expected).norm(dim=1) / wrong.expected.norm(dim=1)
        if float(error.max()) <= 2 * largest_rounding(dtype) * rounding_unit(dtype):
            how = "cut off" if _is_towards_zero(wrong) else "rounded"
            instead = " instead of rounded" if _is_towards_zero(wrong) else ""
            yield Hypothesis(cause=f"the output is {how} to {name_of(dtype)}{instead}", output=wrong.actual)
            return
    if wrong.dtype in HALF_DTYPES and _is_cut_off(wrong):
        yield Hypothesis(
            cause=f"the output is cut off to {name_of(wrong.dtype)} instead of rounded", output=wrong.actual
        )


def _is_towards_zero(wrong: WrongOperation) -> bool:
    """Whether next to no element is larger than it should be, of many that are not as they should be."""
    larger = wrong.actual.abs() > wrong.expected.abs() * (1 + rounding_unit(wrong.dtype))
    return wrong.actual.numel() >= _MANY and float(larger.float().mean()) < _FEW


def _is_cut_off(wrong: WrongOperation) -> bool:
    """Return whether the elements equal truncated values where rounded values would differ."""
    cut, nearest = cut_off(wrong.expected, wrong.dtype), rounded(wrong.expected, wrong.dtype)
    tells = cut != nearest
    is_cut = (wrong.actual == cut)[tells]
    return len(is_cut) >= _MANY and float(is_cut.float().mean()) > 1 - _FEW
