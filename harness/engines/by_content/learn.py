"""Learns the map of an engine from a few small steps: which of its tensors are which of HF's values."""

from collections.abc import Iterator, Mapping

import torch

from harness.base.metrics import rounding_unit
from harness.engines.by_content.columns import RowOrder, relative_error
from harness.engines.by_content.hf_run import EndOfRun, run_hf
from harness.engines.by_content.steps import Site, Stepper, one_token_steps, recomputes, tokens_ahead, watched_step
from harness.engines.by_content.tap_map import MappedTap, TapMap
from harness.engines.by_content.tap_sites import LaterSteps, find_first
from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Operation
from harness.oracle.declared_inputs import has_declared_inputs, inputs_as_declared
from harness.oracle.model import HFModel

_DRAWS_OF_QUANTISED = 3
_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_LENGTHS = (29, 31, 37, 41, 43, 47, 53, 59, 61, 67)


def learn_map(stepper: Stepper, hf: HFModel, *, dtype: torch.dtype, numbers: Iterator[int]) -> TapMap:
    """Learn the map of an engine that should be a model in float32; `numbers` are of requests it has not seen.

    Where a checkpoint declares that inputs of products are quantised, an engine may do so or not, and an input that
    lies between two codes hides what is computed from it: the best of several maps is taken.

    Raises:
        HarnessError: DIFFERENT_DTYPES: most products of the engine are in 16 bits, and `dtype` is another one.
    """
    maps = [_learn(stepper, hf, dtype=dtype, numbers=numbers, draw=0)]
    for draw in range(_DRAWS_OF_QUANTISED if has_declared_inputs(hf) else 0):
        with inputs_as_declared(hf, torch.float32):
            maps.append(_learn(stepper, hf, dtype=dtype, numbers=numbers, draw=draw))
    return max(maps, key=lambda tap_map: len(tap_map.taps))


def _learn(stepper: Stepper, hf: HFModel, *, dtype: torch.dtype, numbers: Iterator[int], draw: int) -> TapMap:
    num_requests, num_tokens = _unmistakable(hf.graph)
    ids, prompt = _random_ids(hf, num_requests, draw), _random_ids(hf, num_tokens + 1, draw)
    number, ahead = next(numbers), tokens_ahead(stepper)
    after = [_random_ids(hf, ahead, draw + 1 + token) for token in ids]
    end = _random_ids(hf, ahead, draw)
    seen = one_token_steps(stepper, ids, numbers, after)
    _refuse_other_dtype(type(stepper).__name__, seen, dtype)
    prefill = watched_step(stepper, [(number, prompt[:-1], 0)], [[prompt[-1], *end]])
    decode = watched_step(stepper, [(number, prompt[-1:], num_tokens)], [end])
    lasting = {site: tensor for site, tensor in seen.items() if site in prefill and site in decode}
    rounding = rounding_unit(dtype)
    with hf.followed_by(after):
        first = find_first(hf, ids, lasting, rounding=rounding)
    later = LaterSteps(hf, prompt, prefill, decode, is_again=recomputes(stepper), rounding=rounding)
    with hf.followed_by([end]):
        later.tell_apart(first)
    row_order, refusal = _row_order(stepper, hf, later.taps, numbers)
    return TapMap(
        taps=later.taps, uncertain=later.uncertain, row_order=row_order, num_tensors=len(seen), refusal=refusal
    )


def _refuse_other_dtype(engine: str, seen: Mapping[Site, torch.Tensor], dtype: torch.dtype) -> None:
    """Refuse an engine that multiplies in 16 bits where another dtype is checked: its roundings would be mistakes."""
    products = [tensor.dtype for site, tensor in seen.items() if site.what in _PRODUCTS]
    for half in (torch.bfloat16, torch.float16):
        if half is not dtype and 2 * products.count(half) > len(products):
            name = str(half).removeprefix("torch.")
            raise HarnessError(
                Code.DIFFERENT_DTYPES,
                "the engine's products are of another dtype than the check",
                where=engine,
                expected=str(dtype).removeprefix("torch."),
                actual=name,
                hint=f"--dtype {name}",
            )


def _row_order(
    stepper: Stepper, hf: HFModel, taps: Mapping[str, MappedTap], numbers: Iterator[int]
) -> tuple[RowOrder | None, str | None]:
    """Return how the rows of two requests lie in a step: seen at the first tap. None: it is of one request.

    And what the engine raised there.
    """
    first = next((op.tap for op in hf.graph if op.tap in taps and not taps[op.tap].is_sampled_only), None)
    if first is None:
        return None, None
    ids, spans = _random_ids(hf, 8), (range(3), range(5))
    try:
        seen = watched_step(stepper, [(next(numbers), ids[:3], 0), (next(numbers), ids[3:], 0)])
    except Exception as error:  # an engine of one request a step
        is_unpacked = "too many values to unpack" in str(error)  # ((request, tokens, first),) = work
        return None, None if is_unpacked else f"{type(error).__name__}: {error}"
    source = taps[first].sources[0]
    if source.site not in seen:
        return None, None
    expected: list[torch.Tensor] = []

    def look(operation: Operation, value: torch.Tensor) -> None:
        if operation.tap == first:
            expected.append(value)
            raise EndOfRun

    run_hf(hf, torch.tensor(ids)[None], look)
    for order in RowOrder:
        rows = source.read_all(seen[source.site], spans, order)
        if rows is not None and relative_error(rows, expected[0]) <= 0.1:
            return order, None
    return None, None


def _random_ids(hf: HFModel, count: int, draw: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(count + 1000 * draw)
    return torch.randperm(hf.vocab_size, generator=generator)[:count].tolist()


def _unmistakable(graph: Graph) -> tuple[int, int]:
    """Return numbers of requests and of tokens that no dimension of the model has, nor the next ones."""
    sizes = {size for operation in graph for size in operation.shape}
    free = [length for length in _LENGTHS if not sizes & {length, length + 1}] or list(_LENGTHS)
    return free[1 % len(free)], free[0]
