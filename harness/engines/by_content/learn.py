"""Learns the map of an engine from a few small steps: which of its tensors are which of HF's values."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from harness.base.metrics import rounding_unit
from harness.engines.by_content.columns import LOOSE, relative_error
from harness.engines.by_content.forwards import RowOrder, RowTeller, SiteRows, StepForward, find_lookups, run_step
from harness.engines.by_content.hf_run import EndOfRun, run_hf
from harness.engines.by_content.rows import RequestWork
from harness.engines.by_content.steps import (
    RETURNED,
    Lookup,
    Site,
    Stepper,
    Work,
    finish,
    module_paths,
    recomputes,
    tokens_ahead,
    watched_run,
)
from harness.engines.by_content.tap_map import MappedTap, StepBatch, TapMap
from harness.engines.by_content.tap_sites import LaterSteps, find_first
from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Operation
from harness.oracle.declared_inputs import has_declared_inputs, inputs_as_declared
from harness.oracle.model import HFModel

_DRAWS_OF_QUANTISED = 3
_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_NUM_ALONE = 6
"""Tokens of a request that is alone in its step."""
_FEW = (11, 13, 17, 19, 23)
"""Numbers of requests of one token, each of which may be a forward of its own."""
_LENGTHS = (29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
"""Of the prompt, which is one forward: engines compute more than 16 rows, or later positions, in other ways."""


def learn_map(
    stepper: Stepper,
    hf: HFModel,
    *,
    dtype: torch.dtype,
    numbers: Iterator[int],
    tap_names: Mapping[str, str] | None = None,
) -> TapMap:
    """Learn the map of an engine that should be a model in float32; `numbers` are of requests it has not seen.

    Where a checkpoint declares that inputs of products are quantised, an engine may do so or not, and an input that
    lies between two codes hides what is computed from it: the best of several maps is taken.

    Raises:
        HarnessError: DIFFERENT_DTYPES: most products of the engine are in 16 bits, and `dtype` is another one.
    """
    maps = [_learn(_Probes(stepper, hf, numbers, 0), dtype, tap_names)]
    for draw in range(_DRAWS_OF_QUANTISED if has_declared_inputs(hf) else 0):
        with inputs_as_declared(hf, torch.float32):
            maps.append(_learn(_Probes(stepper, hf, numbers, draw), dtype, tap_names))
    return max(maps, key=lambda tap_map: len(tap_map.taps))


@dataclass(frozen=True, slots=True)
class _Step:
    """A small step, to learn from."""

    forwards: list[StepForward]
    work: list[RequestWork]
    returned: torch.Tensor


class _Probes:
    """Runs small steps of unlike tokens."""

    def __init__(self, stepper: Stepper, hf: HFModel, numbers: Iterator[int], draw: int) -> None:
        self.stepper, self.hf, self.numbers, self.draw = stepper, hf, numbers, draw
        self.ahead = tokens_ahead(stepper)
        self.num_forwards: list[int] = []
        self.num_columns = 0
        """Of what a step returned."""
        self._open: list[int] = []
        """Requests that have not ended."""

    def begin(self) -> int:
        """Return the number of a new request."""
        self._open.append(next(self.numbers))
        return self._open[-1]

    def finish(self) -> None:
        """End all requests. One whose step was refused, as an engine may refuse many at once, is unknown to it."""
        while self._open:
            with suppress(Exception):
                finish(self.stepper, self._open.pop())

    def ids(self, num: int, avoided: Collection[int] = ()) -> list[int]:
        """Return unlike token ids."""
        ids = _random_ids(self.hf, num + len(avoided), self.draw)
        return [token for token in ids if token not in avoided][:num]

    def after(self, token: int) -> list[int]:
        """Return the ids that follow a token, for the layers that predict further ones."""
        return _random_ids(self.hf, self.ahead, self.draw + 1 + token)

    def run(
        self,
        teller: RowTeller,
        work: Work,
        earlier: Sequence[list[int]] | None = None,
        following: Sequence[Sequence[int]] = (),
    ) -> _Step:
        """Run a step; `earlier` are the tokens of each request before it."""
        forwards, returned = run_step(self.stepper, work, teller, keep=_copied, following=following)
        self.num_forwards.append(len(forwards))
        self.num_columns = returned.shape[1]
        before = earlier or [[] for _ in work]
        asked = [RequestWork([*old, *tokens], first) for (_, tokens, first), old in zip(work, before, strict=True)]
        return _Step(forwards, asked, returned.detach().to("cpu", copy=True))

    def teller(self) -> RowTeller:
        """Return what tells the rows of the engine's steps: by its look-ups of token ids, if it shows them."""
        tokens = self.ids(_NUM_ALONE, avoided=(0,))
        shows_ids = not hasattr(self.stepper, "watching") and not self.ahead
        lookups = self._lookups(tokens[:2]) if shows_ids else set[Lookup]()
        teller = RowTeller(lookups, recomputes=recomputes(self.stepper))
        if teller.lookups:
            alone = self.run(teller, [(self.begin(), tokens, 0)])
            teller.learn(alone.forwards, alone.work)
            if teller.tell(alone.forwards, alone.work).ambiguous:
                return RowTeller((), recomputes=recomputes(self.stepper))
        return teller

    def _lookups(self, tokens: Sequence[int]) -> set[Lookup]:
        """Return where an engine looks up the tokens of a request, which come one in each step."""
        number = self.begin()
        lookups = [find_lookups(self._integers(number, token, at), [token]) for at, token in enumerate(tokens)]
        self.finish()
        return set.intersection(*map(set, lookups))

    def _integers(self, number: int, token: int, position: int) -> list[tuple[Lookup, torch.Tensor, bool]]:
        """Return all integers that modules and operators are given in a step of one token."""
        shown: list[tuple[Lookup, torch.Tensor, bool]] = []
        work = [(number, [token], position)]
        watched_run(self.stepper, work, _nothing, only=(), lookups=None, on_ids=lambda *item: shown.append(item))
        return shown


def _copied(_forwards: Sequence[StepForward], _site: Site, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def _nothing(_site: Site, _tensor: torch.Tensor) -> None:
    return None


def _learn(probes: _Probes, dtype: torch.dtype, tap_names: Mapping[str, str] | None) -> TapMap:
    teller = probes.teller()
    probes.finish()
    batch, refusal, several = _batch(probes, teller)
    probes.finish()
    taps, uncertain, num_tensors = _taps(probes, teller, dtype, several, tap_names)
    shows_logits_alone = set(taps) <= {probes.hf.graph.logits}
    if shows_logits_alone:
        _refuse_narrow(probes)
    if several:
        teller.learn_order_of_requests(several[0].forwards, several[0].work, several[0].returned)
    is_assumed = not teller.lookups and not shows_logits_alone  # which are returned in the order of the work
    if is_assumed and batch is not StepBatch.ONE_REQUEST:
        batch = _assumed_batch(probes, teller, taps)
        probes.finish()
    return TapMap(
        taps=taps,
        uncertain=uncertain,
        teller=teller,
        batch=batch,
        num_tensors=num_tensors,
        num_forwards=(min(probes.num_forwards), max(probes.num_forwards)) if teller.lookups else None,
        refusal=refusal,
        num_columns=probes.num_columns,
    )


def _taps(
    probes: _Probes,
    teller: RowTeller,
    dtype: torch.dtype,
    several: Sequence[_Step],
    tap_names: Mapping[str, str] | None,
) -> tuple[dict[str, MappedTap], dict[str, str], int]:
    """Find the taps in steps of requests of one token, and in those of a prompt and the token after it."""
    hf, pads = probes.hf, teller.pads
    num_requests, num_tokens = _unmistakable(hf.graph, frees=hasattr(probes.stepper, "finish"))
    ids, prompt = probes.ids(num_requests, pads), probes.ids(num_tokens + 1, pads)
    end, after = probes.after(0), [probes.after(token) for token in ids]
    singles = _steps_of_one_token(probes, teller, ids, after, together=bool(several))
    number = probes.begin()
    prefill = probes.run(teller, [(number, prompt[:-1], 0)], following=[[prompt[-1], *end]])
    decode = probes.run(teller, [(number, prompt[-1:], num_tokens)], [prompt[:-1]], [end])
    probes.finish()
    for step in (*singles, prefill, decode):
        if len(step.work) == 1:
            teller.learn(step.forwards, step.work)
        teller.learn_layouts(step.forwards, step.work)
    for step in several if teller.lookups else ():
        _forget_reordered(probes, teller, step)
    seen = _side_by_side([_rows_of(teller, step) for step in singles])
    _refuse_other_dtype(probes.stepper, seen, dtype)
    first_step, next_step = _rows_of(teller, prefill), _rows_of(teller, decode)
    lasting = {site: rows for site, rows in seen.items() if site in first_step and site in next_step}
    rounding = rounding_unit(dtype)
    with hf.followed_by(after):
        first = find_first(hf, ids, lasting, rounding=rounding, tap_names=tap_names)
    later = LaterSteps(hf, prompt, first_step, next_step, rounding=rounding)
    with hf.followed_by([end]):
        later.tell_apart(first)
    return later.taps, later.uncertain, len(seen)


def _refuse_narrow(probes: _Probes) -> None:
    """Refuse an engine that shows its logits alone, and not for each token: nothing of it could be judged."""
    num_tokens = probes.hf.graph[probes.hf.graph.logits].shape[-1]
    if probes.num_columns < num_tokens:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            "the engine's step does not return a logit for each token of the vocabulary",
            where=f"{type(probes.stepper).__name__}.step",
            expected=f"{num_tokens} columns",
            actual=f"{probes.num_columns} columns",
            hint="return the logits of the whole vocabulary",
        )


def _forget_reordered(probes: _Probes, teller: RowTeller, step: _Step) -> None:
    """Compute the prompts of a step alone; if it returned the same, forget the layouts in which its rows are others.

    Where each forward is of one request, as in an engine that loops over requests, there is nothing to exchange.
    """
    if not teller.has_mixed_forwards(step.forwards, step.work):
        return
    prompts = {at: list(item.tokens) for at, item in enumerate(step.work) if item.first == 0}
    alone = {at: probes.run(teller, [(probes.begin(), tokens, 0)]) for at, tokens in prompts.items()}
    probes.finish()
    if all(relative_error(step.returned[at], one.returned[0]) <= LOOSE for at, one in alone.items()):
        teller.forget_reordered(step.forwards, step.work, {at: _rows_of(teller, one) for at, one in alone.items()})


def _steps_of_one_token(
    probes: _Probes, teller: RowTeller, ids: Sequence[int], after: Sequence[Sequence[int]], *, together: bool
) -> list[_Step]:
    """Run many requests of one token: as many in a step as the engine takes, or each in a step of its own."""
    steps, at, size = list[_Step](), 0, len(ids) if together else 1
    while at < len(ids):
        part = slice(at, at + size)
        try:
            work = [(probes.begin(), [token], 0) for token in ids[part]]
            steps.append(probes.run(teller, work, following=after[part]))
            at += size
        except Exception:  # an engine of fewer requests a step, or without the memory for them
            if size == 1:
                raise
            size = (size + 1) // 2
        finally:
            probes.finish()
    return steps


def _rows_of(teller: RowTeller, step: _Step) -> dict[Site, SiteRows]:
    """Return what a step shows of all its rows, and what it returned."""
    shown = {site: item for site, item in teller.in_order(step.forwards, step.work).items() if item.is_known.all()}
    is_known = torch.ones(len(step.returned), dtype=torch.bool)
    return {**shown, Site("", 0, RETURNED): SiteRows(step.returned, is_known, is_by_request=True)}


def _side_by_side(steps: Sequence[Mapping[Site, SiteRows]]) -> dict[Site, SiteRows]:
    """Return the rows of steps, one after the other, of sites that all of them have."""
    common = [site for site in steps[0] if all(site in step for step in steps)]
    same = [site for site in common if len({step[site].values.shape[1] for step in steps}) == 1]
    return {
        site: SiteRows(
            torch.cat([step[site].values for step in steps]),
            torch.cat([step[site].is_known for step in steps]),
            steps[0][site].is_by_request,
        )
        for site in same
    }


def _batch(probes: _Probes, teller: RowTeller) -> tuple[StepBatch, str | None, list[_Step]]:
    """Run steps of several requests, which show in which order the engine computes them.

    Returns:
        What a step may hold; what the engine raised, if a step is of one request; and steps of several requests, the
        first one of prompts.
    """
    ids = probes.ids(13, avoided={0, *teller.pads})
    prompts = [ids[:2], ids[2:5], ids[5:6]]  # short ones: an engine may have little memory, and free none of it
    numbers = [probes.begin() for _ in prompts]
    try:
        first = probes.run(teller, [(number, tokens, 0) for number, tokens in zip(numbers, prompts, strict=True)])
    except Exception as error:  # an engine of one request a step
        is_unpacked = "too many values to unpack" in str(error)  # ((request, tokens, first),) = work
        refusal = " ".join((error.what if isinstance(error, HarnessError) else str(error)).split())
        return StepBatch.ONE_REQUEST, None if is_unpacked else f"{type(error).__name__}: {refusal}", []
    teller.learn(first.forwards, first.work)
    if teller.lookups and teller.tell(first.forwards, first.work).ambiguous:
        return StepBatch.ONE_REQUEST, "rows of several requests that token ids do not tell apart", []
    decode = [(number, [ids[6 + at]], len(prompts[at])) for at, number in enumerate(numbers)]
    try:
        second = probes.run(teller, decode, prompts)
        teller.learn(second.forwards, second.work)
        longer = [[*tokens, ids[6 + at]] for at, tokens in enumerate(prompts)]
        numbers.append(probes.begin())
        mixed = [(numbers[2], [ids[9]], 2), (numbers[3], ids[10:12], 0), (numbers[0], [ids[12]], 3)]
        third = probes.run(teller, mixed, [longer[2], [], longer[0]])
        teller.learn(third.forwards, third.work)
    except Exception:  # a padded batch that only becomes smaller
        return StepBatch.PADDED, None, [first]
    is_padded = any(len(forward.ids) > 1 and len(forward.ids) == len(first.work) for forward in first.forwards)
    return StepBatch.PADDED if is_padded else StepBatch.MIXED, None, [first, third]


def _assumed_batch(probes: _Probes, teller: RowTeller, taps: Mapping[str, MappedTap]) -> StepBatch:
    """Learn how the rows of two requests lie in a step, from the first tap: see `RowOrder`."""
    hf = probes.hf
    first = next((op.tap for op in hf.graph if op.tap in taps and not taps[op.tap].is_sampled_only), None)
    if first is None:
        return StepBatch.ONE_REQUEST
    ids, source, numbers = probes.ids(12), taps[first].sources[0], [probes.begin() for _ in range(3)]

    def fits(step: _Step, tokens: Sequence[int]) -> bool:
        rows = _rows_of(teller, step).get(source.site)
        if rows is None or rows.is_by_request:
            return False
        return relative_error(source.columns.of(rows.values), _value_of(hf, first, tokens)) <= LOOSE

    try:
        step = probes.run(teller, [(numbers[0], ids[:3], 0), (numbers[1], ids[3:8], 0)])
    except Exception:
        return StepBatch.ONE_REQUEST
    for teller.order in RowOrder:
        if fits(step, ids[:8]):
            break
    else:
        teller.order = RowOrder.PACKED
        return StepBatch.ONE_REQUEST
    mixed = [(numbers[0], ids[8:9], 3), (numbers[2], ids[9:11], 0), (numbers[1], ids[11:], 5)]
    try:
        step = probes.run(teller, mixed, [ids[:3], [], ids[3:8]])
    except Exception:  # an engine without prompts beside decode
        return StepBatch.PADDED
    is_mixed = teller.order is RowOrder.PACKED and fits(step, ids[8:])
    return StepBatch.MIXED if is_mixed else StepBatch.PADDED


def _value_of(hf: HFModel, tap: str, tokens: Sequence[int]) -> torch.Tensor:
    """Return HF's value of a tap for tokens, [tokens, W]."""
    values: list[torch.Tensor] = []

    def look(operation: Operation, value: torch.Tensor) -> None:
        if operation.tap == tap:
            values.append(value)
            raise EndOfRun

    run_hf(hf, torch.tensor(tokens)[None], look)
    return values[0]


def _refuse_other_dtype(stepper: Stepper, seen: Mapping[Site, SiteRows], dtype: torch.dtype) -> None:
    """Refuse an engine that multiplies in 16 bits where another dtype is checked: its roundings would be mistakes.

    And one whose weights are in float32, and so its products, where 16 bits are checked: mistakes would be roundings.
    """
    products = [rows.values.dtype for site, rows in seen.items() if site.what in _PRODUCTS]
    weights = {item.dtype for module in module_paths(stepper) for item in module.parameters(recurse=False)}
    for computed in (torch.bfloat16, torch.float16, *(weights if weights == {torch.float32} else ())):
        if computed is not dtype and 2 * products.count(computed) > len(products):
            name = str(computed).removeprefix("torch.")
            raise HarnessError(
                Code.DIFFERENT_DTYPES,
                "the engine's products are of another dtype than the check",
                where=type(stepper).__name__,
                expected=str(dtype).removeprefix("torch."),
                actual=name,
                hint=f"--dtype {name}",
            )


def _random_ids(hf: HFModel, count: int, draw: int = 0) -> list[int]:
    """Return unlike token ids."""
    generator = torch.Generator().manual_seed(count + 1000 * draw)
    return torch.randperm(hf.vocab_size, generator=generator)[:count].tolist()


def _unmistakable(graph: Graph, *, frees: bool) -> tuple[int, int]:
    """Return numbers of requests and of tokens that no dimension of the model has, nor the next ones.

    Requests are few: each may be a forward of its own. So are tokens where an engine frees nothing: what it learns from
    stays in its memory beside what is checked.
    """
    sizes = {size for operation in graph for size in operation.shape}
    lengths = (*_FEW, *_LENGTHS)
    free = [length for length in lengths if not sizes & {length, length + 1}] or list(lengths)
    num_tokens = next((length for length in free if not frees or length >= _LENGTHS[0]), free[-1])
    return next(length for length in [*free, *lengths] if length != num_tokens), num_tokens
