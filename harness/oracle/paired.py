"""HF's forward run twice, side by side: in the engine's dtype, the *control*, and in high precision, the *truth*.

Both see the same tokens, and whatever an observer puts in the place of their values. The truth says what each
operation should give, the control what legitimate rounding does to it.

The truth runs on the thread that calls `run_pair`, the control on a thread of its own, and they take turns at every
operation (`Turns`). So both are whole forwards of HF's code, whatever that does between the parts, and no more of the
control is held than its forward holds. The hooks stand on the same modules for both threads, so each asks whose thread
it is on. `Watch` shows the operations of the running forward to its `_Side`, which hands them to the observer as rows.

Of a long prompt, products and attention are computed at a `Sample` of its rows alone.
"""

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import prod
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from harness.formats.taps import Kind, Operation
from harness.oracle.attention import of_queries
from harness.oracle.caches import cache_of
from harness.oracle.model import HFModel
from harness.oracle.precision import Buffers, upcast_on_use, upcast_parameters
from harness.oracle.turns import Ahead, Turns
from harness.oracle.watch import (
    AttentionCall,
    Watch,
    as_rows,
    choice_of_positions,
    chosen_positions,
    from_rows,
    run_attention,
    watching,
)

_ROWLESS_OPTIONS = frozenset({"s_aux", "position_ids", "cache_position"})
"""Tensors among the options of attention that say nothing of single queries, or that no function reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Where products and attention are computed; attention still sees all of its history.

    What is not computed is left to the observer of the run, which replaces all rows of the sample's taps.
    """

    positions: torch.Tensor
    """[n] int64, ascending: of every request."""
    taps: Collection[str]
    """What linear modules and attention give."""
    product_places: torch.Tensor | None = None
    """[n] int64, ascending, request times tokens, plus token: where linear modules run; None for `positions`."""

    def modules(self, hf: HFModel) -> Mapping[Kind, Collection[str]]:
        """Return the linear modules, and those of attention, that give nothing but taps of the sample."""
        outputs: dict[tuple[Kind, str], list[str]] = {}
        for op in hf.graph:
            outputs.setdefault((op.kind, op.module), []).append(op.tap)
        whole = {key for key, taps in outputs.items() if all(tap in self.taps for tap in taps)}
        return {
            Kind.LINEAR: {path for kind, path in whole if kind is Kind.LINEAR and type(hf.module(path)) is nn.Linear},
            Kind.ATTENTION: {path for kind, path in whole if kind is Kind.ATTENTION},
        }


def are_queries_apart(call: AttentionCall, function: Callable[..., Any]) -> bool:
    """Return whether a row's attention does not depend on the other queries, as far as its options are known.

    Without a mask only torch's own function is known to see what lies before each query.
    """
    from transformers import AttentionInterface

    if call.mask is None:
        is_causal = call.options.get("is_causal") is not False and getattr(call.module, "is_causal", True)
        is_known = function is AttentionInterface()["sdpa"] and call.query.shape[2] == call.key.shape[2]
        if not (is_causal and is_known):
            return False
    return has_rowless_options(call)


def has_rowless_options(call: AttentionCall) -> bool:
    """Return whether no option of attention, as far as they are known, says anything of single queries."""
    return {name for name, value in call.options.items() if isinstance(value, torch.Tensor)} <= _ROWLESS_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The output of one operation in one of the two forwards."""

    operation: Operation
    rows: torch.Tensor
    """[rows, ...] in the forward's dtype."""
    places: torch.Tensor | None = None
    """[rows] int64: request times tokens, plus token; None if all tokens of all requests are there in order."""
    call: AttentionCall | None = None
    """The inputs of attention; None for every other operation."""
    scores: torch.Tensor | None = None
    """[rows, n] by which a router chose; None for every other operation."""
    module_input: torch.Tensor | None = None
    """[requests * tokens, in] of a linear module that was run on a sample of them; None of every other operation."""

    def in_all_places(self, rows: torch.Tensor, num_places: int) -> torch.Tensor:
        """Return rows of the value, [num_places, ...]; where it has none, they are NaN or -1."""
        if self.places is None:
            return rows
        unknown = torch.nan if rows.is_floating_point() else -1
        table = rows.new_full((num_places, *rows.shape[1:]), unknown)
        table[self.places.to(rows.device)] = rows
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCall:
    """What the truth called one part of the model with."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    logit_positions: torch.Tensor | None = None
    """Positions whose logits are computed, int64; None for all."""


class PairObserver(Protocol):
    """Is shown every operation in the order of the run, the control's value before the truth's.

    No two of its methods ever run at the same time, though `control` runs on another thread than the others.
    """

    def part_begins(self, call: PartCall) -> None:
        """On the truth's thread: take what the truth is about to run a part on; the run may change its tensors."""

    def control(self, value: Value) -> torch.Tensor | None:
        """On the control's thread: return rows that replace the control's, in any dtype; None to keep them."""

    def truth(self, value: Value) -> torch.Tensor | None:
        """On the truth's thread: return rows that replace the truth's, in any dtype; None to keep them."""

    def part_done(self) -> None:
        """On the truth's thread: finish what needs the part's weights, which go next. Called at the end, too."""


@torch.no_grad()
def run_pair(
    hf: HFModel,
    ids: torch.Tensor,
    observer: PairObserver,
    *,
    truth_dtype: torch.dtype,
    logit_positions: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    use_cache: bool = False,
    inputs: Mapping[str, torch.Tensor] = MappingProxyType({}),
    sample: Sample | None = None,
    control_arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext,
    has_control: bool = True,
) -> tuple[Any, Any]:
    """Run both forwards over some requests and show every operation to the observer.

    Returns the caches that they leave, the control's and the truth's; None where they are not to use one.

    Args:
        hf: the model.
        ids: [requests, tokens] int64; shorter requests are padded after their end, where no row of theirs looks.
        observer: is shown the values.
        truth_dtype: float64 or float32.
        logit_positions: positions whose logits are computed; None for all.
        progress: told how many of how many parts of the model were run.
        use_cache: whether the model fills a cache of its own.
        inputs: what the forward takes beside the tokens, the images of the only request.
        sample: where products and attention are computed; None for everywhere.
        control_arithmetic: entered on the control's thread, what it computes in another way than HF (`SoftplusByLog`).
        has_control: whether to run the control; without it only the truth is shown.
    """
    ids = ids.to(hf.device)
    if logit_positions is not None and len(logit_positions) == ids.shape[1]:
        logit_positions = None
    of_control, of_truth = (_Forward(hf, ids, logit_positions, inputs, use_cache=use_cache) for _ in range(2))
    _ = hf.graph  # traced now: later two forwards are under way
    kept = None if logit_positions is None else torch.tensor(list(logit_positions))
    with ExitStack() as stack:
        stack.enter_context(hf.exactly(dtype=truth_dtype))
        watch = stack.enter_context(watching(hf))
        turns: Turns

        def control_shows(value: Value) -> torch.Tensor | None:
            replacement = observer.control(value)
            turns.control_showed(value.operation.tap)
            return replacement

        def truth_shows(value: Value) -> torch.Tensor | None:
            turns.reach(value.operation.tap)
            return observer.truth(value)

        side = _Side(hf, ids.shape, kept, control_shows, sample)
        control = Ahead(partial(_run_control, of_control, watch, side, control_arithmetic) if has_control else _nothing)
        stack.callback(control.cancel)
        turns = Turns(control)
        stack.enter_context(_parts_in_turn(hf, turns, truth_dtype, kept, observer, progress))
        side = _Side(hf, ids.shape, kept, truth_shows, sample)
        stack.enter_context(watch.showing(side, narrowed=side.narrowed))
        logits = of_truth()
        control.finish()
        with torch._C.DisableTorchFunction():
            side.see("logits", logits)
            observer.part_done()
    return of_control.cache, of_truth.cache


class _Forward:
    """One forward of the model, and the cache that it leaves."""

    def __init__(
        self,
        hf: HFModel,
        ids: torch.Tensor,
        positions: Sequence[int] | None,
        inputs: Mapping[str, torch.Tensor],
        *,
        use_cache: bool,
    ) -> None:
        self.cache: Any = None
        self._hf, self._options = hf, {**inputs, "input_ids": ids, "use_cache": use_cache}
        if positions is not None and "logits_to_keep" in inspect.signature(hf.model.forward).parameters:
            self._options["logits_to_keep"] = torch.tensor(list(positions), device=ids.device)

    def __call__(self) -> torch.Tensor:
        output = self._hf.run(**self._options)
        if self._options["use_cache"]:
            self.cache = cache_of(output)
        logits: torch.Tensor = output.logits
        return logits


class _SeenError(Exception):
    """Ends a run where the operation was seen."""


@torch.no_grad()
def run_as_far_as(
    tap: str,
    hf: HFModel,
    watch: Watch,
    call: PartCall,
    shape: Sequence[int],
    show: Callable[[Value], torch.Tensor | None],
) -> torch.Tensor:
    """Run a module by itself, in float64, which it is held in, as far as an operation; return what that gives, [P, W].

    Args:
        tap: of the operation, which is in the module.
        hf: the model.
        watch: hooks on the model.
        call: the module, and its arguments.
        shape: number of requests and of tokens, `P` places together.
        show: shown every operation up to this one; returns rows to go on with, or None.
    """
    outputs = list[torch.Tensor]()

    def seen(value: Value) -> torch.Tensor | None:
        replaced = show(value)
        if value.operation.tap != tap:
            return replaced
        rows = value.in_all_places(value.rows, prod(shape))
        outputs.append(rows.flatten(1).to("cpu", torch.float64, copy=True))
        raise _SeenError

    args, kwargs = tree_map(_in_float64, (call.args, call.kwargs))
    side = _Side(hf, shape, call.logit_positions, seen)
    with suppress(_SeenError), hf.exactly(), watch.showing(side):
        hf.module(call.path)(*args, **kwargs)
    return outputs[0]


def _in_float64(x: Any) -> Any:
    """Return a copy that the run may change."""
    is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.to(torch.float64, copy=True) if is_float else x


@torch.no_grad()
def _run_control(
    forward: Callable[[], torch.Tensor],
    watch: Watch,
    side: "_Side",
    arithmetic: Callable[[], AbstractContextManager[Any]],
) -> None:
    with watch.showing(side, narrowed=side.narrowed), arithmetic():
        side.see("logits", forward())


def _nothing() -> None:
    """End at once, as a control that is not to run."""


@contextmanager
def _parts_in_turn(
    hf: HFModel,
    turns: Turns,
    truth_dtype: torch.dtype,
    kept: torch.Tensor | None,
    observer: PairObserver,
    progress: Callable[[int, int], None] | None,
) -> Iterator[None]:
    """Before the truth runs a part: read its weights and upcast them; drop them after both have run it."""
    truth, num_run, buffers = threading.get_ident(), count(1), Buffers()
    with ExitStack() as stack:
        is_truth = lambda: threading.get_ident() == truth  # noqa: E731
        stack.enter_context(upcast_on_use(truth_dtype, hf.model, applies=is_truth, device=hf.device))
        for path in hf.parts:
            running = stack.enter_context(ExitStack())
            module = hf.module(path)

            def before(
                module: nn.Module, args: Any, kwargs: Any, path: str = path, running: ExitStack = running
            ) -> None:
                if threading.get_ident() != truth:
                    turns.control_at_border()
                    return
                with torch._C.DisableTorchFunction():  # what an observer computes is not the model's code
                    observer.part_begins(PartCall(path=path, args=args, kwargs=kwargs, logit_positions=kept))
                running.enter_context(hf.weights.held(path))
                running.enter_context(turns.part(module, upcast_parameters(truth_dtype, module, buffers=buffers)))

            def after(_module: nn.Module, _args: Any, _output: Any, running: ExitStack = running) -> None:
                if threading.get_ident() != truth:
                    turns.control_at_border()
                    return
                turns.finish_part()
                with torch._C.DisableTorchFunction():
                    observer.part_done()
                running.close()
                if progress is not None:
                    progress(next(num_run), len(hf.parts))

            stack.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield


class _Side:
    """One of the two forwards as the observer sees it: operations of the graph, as rows."""

    def __init__(
        self,
        hf: HFModel,
        shape: Sequence[int],
        kept: torch.Tensor | None,
        show: Callable[[Value], torch.Tensor | None],
        sample: Sample | None = None,
    ) -> None:
        self._operations, self._show = hf.graph.by_source, show
        self._num_requests, self._num_tokens = shape
        self._kept, self._sample = kept, sample
        self._sampled = {} if sample is None else sample.modules(hf)
        self._call: AttentionCall | None = None
        self._input: torch.Tensor | None = None
        """What the linear module that runs now is given, if it is narrowed."""

    def narrowed(self, path: str, x: torch.Tensor) -> torch.Tensor | None:
        """Return the sample's rows of a linear module's input, [n, in]."""
        if self._sample is None or path not in self._sampled[Kind.LINEAR]:
            return None
        shape, is_flat = x.shape[:-1], x.dim() == 2 and len(x) == self._num_requests * self._num_tokens
        if not is_flat and shape != (self._num_requests, self._num_tokens):
            return None
        self._input = x
        return x.reshape(-1, x.shape[-1]).index_select(0, self._product_places().to(x.device))

    def _product_places(self) -> torch.Tensor:
        """[n] int64: where linear modules of the sample run."""
        assert self._sample is not None
        places = self._sample.product_places
        return self._places(self._sample.positions) if places is None else places

    def see(self, source: str, value: torch.Tensor) -> torch.Tensor | None:
        """See `Watcher.see`."""
        return self._see(source, value, None)

    def choose(self, source: str, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """See `Watcher.choose`."""
        return self._see(source, chosen, scores)

    def _see(self, source: str, value: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor | None:
        call, self._call = self._call, None
        operation = self._operations.get(source)
        if operation is None:
            return None
        if operation.among_tokens and scores is not None:
            shown = chosen_positions(value, scores, operation.shape[0])
            rows, scores = (as_rows(item, 1, self._num_requests, self._num_tokens) for item in (shown, scores))
            replacement = self._show(Value(operation=operation, rows=rows, scores=scores))
            return None if replacement is None else choice_of_positions(replacement, value, self._num_tokens)
        dim, places, num_tokens = operation.token_dim, None, self._num_tokens
        if self._kept is not None and value.shape[dim] == len(self._kept):
            places, num_tokens = self._places(self._kept), len(self._kept)
        if self._is_narrowed(operation, value):
            return self._show_sample(operation, value, call)
        rows = as_rows(value, dim, self._num_requests, num_tokens)
        if scores is not None:
            scores = as_rows(scores, dim, self._num_requests, num_tokens)
        replacement = self._show(Value(operation=operation, rows=rows, places=places, call=call, scores=scores))
        return None if replacement is None else _replaced(value, from_rows(replacement, value, dim))

    def _is_narrowed(self, operation: Operation, value: torch.Tensor) -> bool:
        """Whether a value has the rows of the sample alone."""
        if self._sample is None or operation.module not in self._sampled.get(operation.kind, ()):
            return False
        if operation.kind is Kind.LINEAR:
            return self._input is not None
        num_lines = 1 if operation.token_dim else self._num_requests
        return value.shape[operation.token_dim] == num_lines * len(self._sample.positions)

    def _show_sample(self, operation: Operation, value: torch.Tensor, call: AttentionCall | None) -> torch.Tensor:
        """Show the rows of the sample, and return all rows in the shape that the module would have given."""
        assert self._sample is not None
        dim, x, shape = operation.token_dim, self._input, list(value.shape)
        self._input = None
        if x is not None:
            dim, shape, places, rows = 0, [*x.shape[:-1], value.shape[-1]], self._product_places(), value
        else:
            places = self._places(self._sample.positions)
            rows = as_rows(value, dim, self._num_requests, len(self._sample.positions))
            shape[dim] = (1 if dim else self._num_requests) * self._num_tokens
        module_input = None if x is None else x.reshape(-1, x.shape[-1])
        replacement = self._show(
            Value(operation=operation, rows=rows, places=places, call=call, module_input=module_input)
        )
        assert replacement is not None, f"{operation.tap} was to be replaced"
        whole = value.new_empty(shape)
        return whole.copy_(from_rows(replacement, whole, dim))  # the model may change what it is given

    def _places(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the places, [requests * n], of some positions, [n] int64."""
        requests = torch.arange(self._num_requests)[:, None] * self._num_tokens
        return (requests + positions).flatten()

    def attend(self, call: AttentionCall, function: Callable[..., Any]) -> Any:
        """See `Watcher.attend`; values that are not finite do not reach rows that do not see them."""
        cleaned, hole = _without_holes(call)
        self._call = cleaned if call.query.shape[2] == self._num_tokens else None  # else attention among other things
        positions = torch.arange(self._num_tokens)
        is_sampled = self._sample is not None and call.path in self._sampled[Kind.ATTENTION]
        if self._sample is not None and is_sampled and are_queries_apart(call, function):
            positions = self._sample.positions
            cleaned = of_queries(cleaned, positions)
        context, *rest = run_attention(cleaned, function)
        if hole is not None:
            seen = positions.to(context.device)[None] >= hole[:, None]
            context = context.masked_fill(seen[..., None, None], torch.nan)
        return (context, *rest)


def _replaced(value: torch.Tensor, replacement: torch.Tensor) -> torch.Tensor:
    """Write a replacement into a tensor, so that all of the model's code that holds the tensor goes on with it.

    A residual stream is read twice, by a norm and by the sum after it, and only the norm's input is shown. A view of
    something larger is left alone: whoever is given the new value reads that.
    """
    if value.numel() * value.element_size() == value.untyped_storage().nbytes():
        return value.copy_(replacement)
    return replacement.to(value, copy=True)  # the observer may keep it; the model may change what it is given


def _without_holes(call: AttentionCall) -> tuple[AttentionCall, torch.Tensor | None]:
    """Replace keys and values that are not finite; return the first such position of each request, [B].

    A masked position has a weight of zero, and zero times NaN is NaN: one row would poison all others.
    """
    sound = torch.isfinite(call.key).all(dim=-1).all(dim=1) & torch.isfinite(call.value).all(dim=-1).all(dim=1)
    if bool(sound.all()):
        return call, None
    positions = torch.arange(sound.shape[1], device=sound.device)
    hole = torch.where(sound, sound.shape[1], positions).amin(dim=1)
    key, value = (torch.nan_to_num(x, 0, 0, 0) for x in (call.key, call.value))
    return replace(call, key=key, value=value), hole
