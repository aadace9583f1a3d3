"""What a pass rests on: which of the required rows were recorded, and for which share of the compute they were judged.

Coverage fails closed. A required tap that is missing, and a condition that the workload never reached, are findings.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from harness.errors import Code, some_of
from harness.formats.recording import Recording
from harness.formats.taps import Graph, Kind
from harness.judge.compare.align import Locator, Prefixes, all_rows, is_readback
from harness.judge.compare.triggers import (
    Traits,
    extent,
    mislabelled_steps,
    not_reached,
    reached_triggers,
    unreached_triggers,
)
from harness.oracle.model import HFModel
from harness.results.check import Coverage, Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a recording must hold, and the share of it that must have been judged, to pass."""

    wanted: Sequence[str] | None = None
    """Taps that must have been recorded; None for those of the golden."""
    not_offered: Sequence[str] = ()
    """Sites that the engine declares unsupported; they are only reported."""
    sampled_only: Collection[str] = ()
    """Taps that the engine computes for sampled rows only."""
    require: Sequence[str] = ("decode",)
    """Triggers that the workload must have reached."""
    accepts_tokens: bool = False
    """Whether equal tokens are enough to pass where no operation could be judged."""
    least_compute: float = 0.0
    """Share of the model's multiply-adds whose output must be judged to pass."""


def wanted_rows(tap: str, locator: Locator, graph: Graph, sampled_only: Collection[str] = ()) -> torch.Tensor:
    """Return [requests, positions] bool: the rows at which `tap` must be recorded.

    Args:
        tap: its name.
        locator: of the engine's recording.
        graph: of the model.
        sampled_only: taps that the engine computes for sampled rows only, besides those of the graph.
    """
    is_sampled_only = tap in sampled_only or (tap in graph and graph[tap].sampled_only)
    is_cache = tap in graph and graph[tap].is_kept
    ahead = graph[tap].tokens_ahead if tap in graph else 0
    window = graph[tap].window if is_cache else None
    requests = sorted(locator.recording.manifest.requests, key=lambda request: request.id)
    wanted = torch.zeros_like(locator.recorded(tap))
    for row, request in enumerate(requests):
        begin = request.prompt_length - 1 if is_sampled_only else 0
        if is_cache and graph[tap].kind is Kind.STATE:  # at its end: the engine decides which earlier states it keeps
            begin = len(request.token_ids) - 1
        if window is not None:  # the engine may drop rows that no later row sees
            begin = max(begin, len(request.token_ids) - window + 1)
        if is_cache and request.draft_of is not None:  # rejected drafts need not be there at the end
            continue
        wanted[row, begin : len(request.token_ids) - ahead] = True
    return wanted


def shared_rows(recorded: torch.Tensor, prefixes: Prefixes) -> torch.Tensor:
    """Return [requests, positions] bool: rows that a request took over from another instead of computing them.

    They come before the first row that the request computed itself, and another has recorded the same tokens there.
    A request that computed nothing took over nothing.
    """
    first = torch.where(recorded.any(dim=1), recorded.int().argmax(dim=1), 0)
    is_before = torch.arange(recorded.shape[1]) < first[:, None]
    return is_before & torch.isin(prefixes.table, prefixes.table[recorded])


def resumed_rows(recording: Recording, prefixes: Prefixes) -> torch.Tensor:
    """Return [requests, positions] bool: prompt rows that a request left out in the middle of its prompt.

    It was preempted there, and found more in the cache than it had computed itself: other requests had computed the
    same tokens meanwhile.
    """
    requests = sorted(recording.manifest.requests, key=lambda request: request.id)
    left_out = torch.zeros(prefixes.table.shape, dtype=torch.bool)
    computed = torch.zeros(prefixes.count, dtype=torch.bool)
    reached = [0] * len(requests)
    for step in (step for step in recording.steps if not is_readback(step)):
        for row, request in enumerate(requests):
            positions = step.position[step.request == request.id].long()
            if not len(positions):
                continue
            begin, end = reached[row], min(int(positions.min()), request.prompt_length - 1)
            if 0 < begin < end:
                left_out[row, begin:end] = computed[prefixes.table[row, begin:end]]
            reached[row] = max(begin, int(positions.max()) + 1)
        computed[prefixes.of(all_rows(step))] = True
    return left_out


def check_coverage(
    locator: Locator,
    graph: Graph,
    taps: Iterable[str],
    requirements: Requirements,
    *,
    traits: Traits | None = None,
    also: Iterable[str] = (),
) -> tuple[Coverage, list[Finding]]:
    """Count the required rows that were recorded.

    Args:
        locator: of the engine's recording.
        graph: of the model.
        taps: that must have been recorded.
        requirements: of the run; triggers are required only of a recording with steps.
        traits: of the model, where it is known.
        also: triggers that were reached and that the recorded steps do not show.
    """
    findings = list[Finding]()
    expected = recorded = 0
    recorded_taps, missing_taps = set(locator.taps()), []
    prefixes, shared = Prefixes(locator.recording.manifest.requests), dict[tuple[str, ...], torch.Tensor]()
    resumed = resumed_rows(locator.recording, prefixes)
    for tap in taps:
        wanted = wanted_rows(tap, locator, graph, requirements.sampled_only) & ~locator.ambiguous
        there, signature = locator.recorded(tap), locator.signature(tap)
        if signature not in shared:
            shared[signature] = there | shared_rows(there, prefixes) | resumed
        there = shared[signature] & wanted
        expected, recorded = expected + int(wanted.sum()), recorded + int(there.sum())
        if tap not in recorded_taps:
            missing_taps += [tap] if bool(wanted.any()) else []  # of rows that are all ambiguous, none is missing
        elif bool((wanted & ~there).any()):
            findings.append(_rows_missing(tap, wanted & ~there, locator))
    findings += [_taps_missing(missing_taps)] if missing_taps else []
    reached = (*reached_triggers(locator.recording, traits), *also)
    required = requirements.require if locator.recording.steps else ()
    findings += [not_reached(name) for name in required if name not in reached]
    coverage = Coverage(
        expected=expected,
        recorded=recorded,
        missing=expected - recorded,
        missing_taps=tuple(missing_taps),
        not_offered=tuple(requirements.not_offered),
        triggers=reached,
        not_reached=unreached_triggers(locator.recording, reached, traits),
        extent=extent(locator.recording, traits),
        steps_mislabelled=mislabelled_steps(locator.recording),
        rows_ambiguous=int(locator.ambiguous.sum()),
    )
    return coverage, findings


def _taps_missing(taps: Sequence[str]) -> Finding:
    return Finding(code=Code.TAP_MISSING, message=f"not recorded: {some_of(taps, 4)}", tap=taps[0])


def _rows_missing(tap: str, missing: torch.Tensor, locator: Locator) -> Finding:
    row, position = missing.nonzero()[0].tolist()
    request = int(locator.request_ids[row])
    message = f"{int(missing.sum())} rows of {tap} are missing, the first at request {request}, position {position}"
    return Finding(code=Code.ROWS_MISSING, message=message, tap=tap, request=request, position=position)


def check_caches(locator: Locator, graph: Graph, usable: Iterable[str], judged: Iterable[str]) -> list[Finding]:
    """Return a finding for each cache that was read back and had nothing to be compared with."""
    unjudged = set(usable) & set(locator.taps()) - set(judged)
    return [
        Finding(
            code=Code.CACHE_NOT_JUDGED,
            message=f"{op.tap} was read back, and neither recording has {op.inputs[0]} to compare it with",
            tap=op.tap,
        )
        for op in graph
        if op.kind is Kind.CACHE and op.tap in unjudged
    ]


def check_tokens(locator: Locator, num_compared: int) -> list[Finding]:
    """Return a finding if the engine did not report its own choice at every sampled row that it computed."""
    requests = sorted(locator.recording.manifest.requests, key=lambda request: request.id)
    computed = locator.computed
    shared = shared_rows(computed, Prefixes(requests))
    expected = sum(
        len(request.token_ids) - request.prompt_length + 1 - int(shared[row, request.prompt_length - 1 :].sum())
        for row, request in enumerate(requests)
        if request.draft_of is None
    )
    if num_compared >= expected:
        return []
    message = f"the engine reported its own choice at {num_compared} of {expected} sampled rows"
    return [Finding(code=Code.ROWS_MISSING, message=message)]


LEAST_JUDGED = 0.5
"""Share of the multiply-adds below which a comparison without findings is no pass: most of the model's work was not
judged."""


def judged_compute(hf: HFModel, judged: Mapping[str, float], *, num_tokens: int) -> float:
    """Return the share of a model's multiply-adds whose output was judged, itself or through what is computed from it.

    Args:
        hf: the model.
        judged: taps that were judged, with the share of their rows that counts; others have that of their readers.
        num_tokens: tokens that a query sees, for the products of attention.
    """
    cost, shares = multiply_adds(hf, num_tokens), dict(judged)
    for operation in reversed(tuple(hf.graph)):
        for tap in set(operation.inputs) - set(judged):
            shares[tap] = max(shares.get(tap, 0.0), shares.get(operation.tap, 0.0))
    whole = sum(cost.values())
    reached = sum(value * shares.get(tap, 0.0) for tap, value in cost.items())
    return reached / whole if whole else max(shares.values(), default=0.0)


def judged_or_before(graph: Graph, judged: Iterable[str]) -> set[str]:
    """Return the taps that were judged, and those that they are computed from."""
    reached: set[str] = set()
    pending = [tap for tap in judged if tap in graph]
    while pending:
        tap = pending.pop()
        if tap not in reached:
            reached.add(tap)
            pending += graph[tap].inputs
    return reached


def multiply_adds(hf: HFModel, num_tokens: int) -> Mapping[str, float]:
    """Return the multiply-adds of each operation for one token, by tap; operations without any are left out.

    A product has one for each element of its weights; experts have the share that a token chooses; attention has those
    of scores and context over `num_tokens` keys. The lookup of an embedding has none.
    """
    cost: dict[str, float] = {}
    by_module = {op.module: op.tap for op in hf.graph if not op.is_kept}
    lookup, share = hf.model.get_input_embeddings(), _chosen_experts(hf)
    for path, module in hf.model.named_modules():
        tap = _holder(path, by_module)
        if module is not lookup and tap is not None:
            factor = share if "experts" in path.split(".") else 1.0
            cost[tap] = cost.get(tap, 0.0) + factor * _num_weights(module)
    for op in hf.graph:
        if op.kind is Kind.ATTENTION and len(op.shape) > 0:
            width = 1
            for size in op.shape:
                width *= size
            seen = num_tokens if op.window is None else min(num_tokens, op.window)
            cost[op.tap] = cost.get(op.tap, 0.0) + 2.0 * width * seen
    return {tap: value for tap, value in cost.items() if value}


def unjudged(graph: Graph, judged: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what was judged only through what is computed from it, and what was not judged at all.

    Both are names of sites, or of taps where a site was judged in other layers.
    """
    reached = judged_or_before(graph, judged)
    through = {op.tap for op in graph if op.tap in reached and op.tap not in judged}
    nothing = {op.tap for op in graph if op.tap not in reached}
    return _as_sites(graph, through), _as_sites(graph, nothing)


def _as_sites(graph: Graph, taps: Collection[str]) -> tuple[str, ...]:
    partly = {op.site for op in graph if op.tap not in taps}
    names = (op.tap if op.site in partly else op.site for op in graph if op.tap in taps)
    return tuple(dict.fromkeys(names))


def _holder(path: str, by_module: Mapping[str, str]) -> str | None:
    """Return the tap of the module, or of the nearest module around it that has one."""
    while path and path not in by_module:
        path = path.rpartition(".")[0]
    return by_module.get(path)


def _num_weights(module: nn.Module) -> int:
    """Count the elements of a module's own matrices. Biases and gains have no products."""
    return sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() > 1)


def _chosen_experts(hf: HFModel) -> float:
    """Return the share of the experts that computes a token; 1 where the config does not state it."""
    chosen = getattr(hf.config, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    there = next((number for name in names if (number := getattr(hf.config, name, None))), None)
    return min(1.0, chosen / there) if isinstance(chosen, int) and isinstance(there, int) else 1.0
