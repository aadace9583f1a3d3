"""The graph of a model's operations, traced from HF's own forward over a few tokens.

Each value that HF shows is a tap if something was computed since the last one; what is shown twice, or moved in
between, is one tap with several names. What an operation is follows from what was run to compute it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from harness.errors import Code, HarnessError
from harness.oracle.caches import cache_windows
from harness.oracle.flow import Flow, Origin, following
from harness.oracle.model import HFModel
from harness.oracle.precision import eager_experts
from harness.oracle.rows import as_rows, token_dim
from harness.oracle.watch import CHOICE, AttentionCall, Seeing, watching, window_of
from harness.taps import LOGITS, Graph, Kind, Operation, layer_of, prefix_of, site_of

_ACTIVATIONS = frozenset({"activation", "silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "hardswish", "mish"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear"})
_NORMS = frozenset({"rsqrt", "native_layer_norm", "rms_norm", "_fused_rms_norm", "linalg_vector_norm"})
_INTERFACE = ("query", "key", "value")
_SAME_ROUNDINGS, _SAME = 256, 1e-3
"""Distance of a row, in roundings and relative to it, within which rows of two requests are the same: they stand
elsewhere in a product."""
_ACTIVATION_FILES = ("transformers.activations", "torch.nn.modules.activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """One value as HF's run shows it."""

    source: str
    origin: Origin
    token_dim: int
    rows: torch.Tensor
    """[rows, ...]."""

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.rows[0].numel()


@dataclass(slots=True)
class _Trace:
    """What one forward showed."""

    num_requests: int
    num_tokens: int
    shown: dict[str, _Shown] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Values that are another one, as a whole and only moved."""
    windows: dict[str, int | None] = field(default_factory=dict)
    """Sliding window of each attention module."""

    def note(self, flow: Flow, source: str, value: torch.Tensor) -> None:
        """Take a value in."""
        dim, origin = token_dim(value, self.num_requests, self.num_tokens), flow.of(value)
        if dim is None or (source.endswith(":input") and not origin.sources):  # masks and positions
            return
        rows = as_rows(value, dim, self.num_requests, self.num_tokens)
        same = None if CHOICE in source else self._shown_already(origin, rows[0].numel())
        if same is not None:
            self.aliases[source] = same
            return
        self.shown[source] = _Shown(source=source, origin=origin, token_dim=dim, rows=rows)
        flow.mark(value, Origin((source,)))

    def _shown_already(self, origin: Origin, width: int) -> str | None:
        if len(origin.sources) != 1 or origin.operations:
            return None
        same = self.aliases.get(origin.sources[0], origin.sources[0])
        return same if same in self.shown and self.shown[same].width == width else None


@torch.no_grad()
def trace_graph(hf: HFModel) -> Graph:
    """Run the model over a few tokens and return its operations in the order of the run."""
    num_requests, (few, more) = unmistakable_sizes(hf)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, hf.vocab_size, (num_requests, more), generator=generator)
    ids[1, : few - 1] = ids[0, : few - 1]  # the first two of the first run differ in their last token only
    trace = _without_other_rows(_trace(hf, ids[:, :few]), _row_shapes(hf, ids))
    if trace.aliases.get("logits", "logits") not in trace.shown:
        raise HarnessError(
            Code.UNSUPPORTED_ARCHITECTURE,
            "the model is no causal language model: logits of a position depend on the tokens after it",
            where=hf.folder,
            expected="a decoder, whose rows depend on what is before them",
            actual=type(hf.model).__name__,
        )
    return _named(hf, trace)


def _trace(hf: HFModel, ids: torch.Tensor) -> _Trace:
    trace = _Trace(*ids.shape)
    with ExitStack() as stack:
        flow = stack.enter_context(following())
        stack.enter_context(_activations_noted(hf, flow))
        calls = _show_run(hf, ids, lambda source, value: trace.note(flow, source, value))
    trace.windows = {path: window_of(call) for path, call in calls.items()}
    return trace


def _row_shapes(hf: HFModel, ids: torch.Tensor) -> dict[str, torch.Size]:
    """Run the model and return the shape of a row of everything that it shows, by source."""
    shapes = {}

    def note(source: str, value: torch.Tensor) -> None:
        dim = token_dim(value, *ids.shape)
        if dim is not None:
            shapes[source] = as_rows(value, dim, *ids.shape).shape[1:]

    _show_run(hf, ids, note)
    return shapes


def _show_run(hf: HFModel, ids: torch.Tensor, sink: Callable[[str, torch.Tensor], None]) -> Mapping[str, AttentionCall]:
    """Run the model over [requests, tokens], show every value to `sink`, and return the calls of attention."""
    watcher = Seeing(sink)
    with ExitStack() as stack:
        stack.enter_context(eager_experts(hf.config))
        watch = stack.enter_context(watching(hf))
        stack.enter_context(all_parts_held(hf))
        stack.enter_context(watch.showing(watcher))
        sink("logits", hf.model(input_ids=ids.to(hf.device), use_cache=False).logits)
    return watcher.calls


def unmistakable_sizes(hf: HFModel) -> tuple[int, tuple[int, int]]:
    """Return a number of requests, and two of tokens, by which a dimension that counts them is told from every other.

    The tokens are no size of the model's, and the requests divide no number of experts, so that rows in another order
    (experts before tokens) do not look alike in two requests.
    """
    settings = {name: value for name, value in vars(hf.config).items() if type(value) is int}
    sizes = {size for parameter in hf.model.parameters() for size in parameter.shape} | set(settings.values())
    experts = [value for name, value in settings.items() if "expert" in name]
    requests = next(n for n in (3, 5, 7, 11, 13) if all(value % n for value in experts if value))
    free = (n for n in (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47) if not {n, n * requests} & sizes)
    return requests, (next(free), next(free))


def _without_other_rows(trace: _Trace, shapes: Mapping[str, torch.Size]) -> _Trace:
    """Leave out values whose rows are not the tokens in their order, and rows as wide as the history is long.

    What a tensor's sizes say may be chance, or rows may be in another order: only the last row may see the last token.
    In a run of another length the rows have the same shape.
    """
    kept = {
        source: each
        for source, each in trace.shown.items()
        if shapes.get(source) == each.rows.shape[1:]
        and _is_causal(each.rows, trace.num_tokens)
        and not _is_mask(each.rows)
    }
    return replace(trace, shown=dict(_bridged(trace.shown, kept)))


def _is_causal(rows: torch.Tensor, num_tokens: int) -> bool:
    """Whether the rows of the first two requests, whose last tokens differ, are the same but for the last."""
    if not rows.is_floating_point():
        return True  # a choice between near scores may fall either way
    distance = min(_SAME, _SAME_ROUNDINGS * torch.finfo(rows.dtype).eps)
    one, other = (rows[at : at + num_tokens - 1].flatten(1).to(torch.float64) for at in (0, num_tokens))
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    one, other = (x.where(x.isfinite(), 0) for x in (one, other))
    return bool(((one - other).norm(dim=1) <= distance * other.norm(dim=1)).all())


def _is_mask(rows: torch.Tensor) -> bool:
    """Whether all that is in the rows is zero or as low as the dtype goes."""
    if not rows.is_floating_point():
        return False
    is_low = rows <= torch.finfo(rows.dtype).min / 2
    return bool(is_low.any() and (is_low | (rows == 0)).all())


def _bridged(shown: dict[str, _Shown], kept: dict[str, _Shown]) -> Iterator[tuple[str, _Shown]]:
    """Yield the values that are kept; one computed from a value that is left out comes from what is behind that."""

    def whole(origin: Origin) -> Origin:
        found = Origin((), origin.operations)
        for source in reversed(origin.sources):
            behind = Origin((source,)) if source in kept or source not in shown else whole(shown[source].origin)
            found = behind | found
        return found

    for source, each in kept.items():
        yield source, replace(each, origin=whole(each.origin))


@contextmanager
def all_parts_held(hf: HFModel) -> Iterator[None]:
    """Read the weights of each part when it begins to run and drop them when it ends."""
    with ExitStack() as stack:
        for path in hf.parts:
            running = ExitStack()
            module = hf.module(path)
            stack.enter_context(running)

            def before(_module: nn.Module, _args: Any, path: str = path, running: ExitStack = running) -> None:
                running.enter_context(hf.weights.held(path))

            def after(_module: nn.Module, _args: Any, _output: Any, running: ExitStack = running) -> None:
                running.close()

            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield


@contextmanager
def _activations_noted(hf: HFModel, flow: Flow) -> Iterator[None]:
    """Note what an activation module computes as one operation, however it is made."""

    def after(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        before = flow.of(args[0])
        flow.mark(output, before | Origin((), ("activation",)))

    with ExitStack() as stack:
        for module in hf.model.modules():
            if type(module).__module__ in _ACTIVATION_FILES:
                stack.callback(module.register_forward_hook(after).remove)
        yield


def _named(hf: HFModel, trace: _Trace) -> Graph:
    """Give every value its kind, its inputs and its name."""
    operations = [
        Operation(
            tap=each.source,
            kind=_kind(each),
            inputs=each.origin.sources,
            source=each.source,
            shape=tuple(each.rows.shape[1:]),
            token_dim=each.token_dim,
        )
        for each in trace.shown.values()
    ]
    operations = _without_parts([_attention(operation, trace) for operation in operations])
    names = _names(hf, operations, trace.aliases)
    renamed = [
        replace(op, tap=names[op.source], inputs=tuple(names[source] for source in op.inputs)) for op in operations
    ]
    last_layer = max((at for at, op in enumerate(renamed) if op.layer is not None), default=-1)
    renamed = [
        replace(op, sampled_only=(behind := at > last_layer >= 0), is_head=behind and not _is_in_body(hf, op))
        for at, op in enumerate(renamed)
    ]
    others = {alias: names[source] for alias, source in trace.aliases.items() if source in names}
    others |= {source: name for source, name in names.items() if source != name}
    others |= {source.replace(":", "."): name for source, name in others.items()}
    others = {alias: name for alias, name in others.items() if alias not in names.values()}
    return Graph(tuple(_with_caches(renamed, cache_windows(hf))), others)


def _attention(operation: Operation, trace: _Trace) -> Operation:
    """Attention reads query, key and value of its own interface, and nothing else (masks are computed, too)."""
    if operation.kind is not Kind.ATTENTION:
        return operation
    parts = [f"{operation.module}:{part}" for part in _INTERFACE]
    inputs = tuple(trace.aliases.get(part, part) for part in parts)
    if not set(inputs) <= set(trace.shown):  # keys that are not those of the tokens, compressed ones for example
        return replace(operation, kind=Kind.OTHER)
    return replace(operation, inputs=inputs, window=trace.windows.get(operation.module))


def _without_parts(operations: list[Operation]) -> list[Operation]:
    """Leave out what is a mere part of another value, but for what attention reads: who reads it reads the whole."""
    parts = {
        op.source: op.inputs
        for op in operations
        if op.kind is Kind.COPY and len(op.inputs) == 1 and op.source.partition(":")[2] not in _INTERFACE
    }

    def whole(source: str) -> tuple[str, ...]:
        return tuple(each for part in parts[source] for each in whole(part)) if source in parts else (source,)

    return [
        replace(op, inputs=tuple(dict.fromkeys(each for source in op.inputs for each in whole(source))))
        for op in operations
        if op.source not in parts
    ]


def _kind(each: _Shown) -> Kind:
    """Tell what an operation is from what was run for it."""
    ran, sources = set(each.origin.operations), each.origin.sources
    part = each.source.partition(":")[2].partition("@")[0]
    if part == "topk":
        return Kind.CHOICE
    if part == "context":
        return Kind.ATTENTION
    if part in ("query", "key") and ran:
        return Kind.ROTARY
    if not ran:
        return Kind.COPY
    if ran == {"embedding"}:
        return Kind.EMBEDDING
    is_output = part in ("", "linear") or part.isdecimal()
    if is_output and len(sources) == 1 and len(ran & _PRODUCTS) == 1 and not ran - _PRODUCTS - {"add", "addmm"}:
        return Kind.LINEAR
    if is_output and len(sources) == 1 and ran & _NORMS and not ran & _PRODUCTS:
        return Kind.NORM
    if ran == {"add"} and len(sources) == 2:
        return Kind.ADD
    if ran & _ACTIVATIONS and not ran - _ACTIVATIONS - {"mul"}:
        return Kind.ACTIVATION
    return Kind.OTHER


def _names(hf: HFModel, operations: list[Operation], aliases: dict[str, str]) -> dict[str, str]:
    """Return the name of each value: its source, or the shorter one of schema 1 where the layer has such a value."""
    names: dict[str, str] = {}
    taken = {path for path, _ in hf.model.named_modules()}
    layers = {path for path in hf.parts if layer_of(f"{path}.x") is not None and not site_of(f"{path}.x")[1:]}
    head = _path_of(hf, hf.model.get_output_embeddings())
    for operation in operations:
        wanted = _short_name(operation, layers, set(names.values()), head)
        is_own = wanted not in taken or operation.source in (wanted, aliases.get(wanted))
        is_free = is_own and wanted not in names.values()
        names[operation.source] = wanted if is_free else operation.source.replace(":", ".")
    return names


def _is_in_body(hf: HFModel, operation: Operation) -> bool:
    """Whether the model without its head computes it."""
    return operation.source.startswith(f"{hf.model.base_model_prefix}.")


def _path_of(hf: HFModel, module: nn.Module | None) -> str:
    return next((path for path, each in hf.model.named_modules() if each is module), "")


def _short_name(operation: Operation, layers: set[str], given: set[str], head: str) -> str:
    source, prefix = operation.source, prefix_of(operation.source)
    path, _, part = source.partition(":")
    if source == head:
        return LOGITS
    if source in layers:
        return f"{source}.output"
    plain = path if part == "linear" else source.replace(":", ".")
    if not prefix:
        return plain
    if operation.kind is Kind.ATTENTION:
        short = f"{prefix}attention"
    elif operation.kind is Kind.ROTARY:
        short = f"{prefix}{'q' if part == 'query' else 'k'}_rope"
    elif operation.kind is Kind.ADD and part == "input":
        short = f"{prefix}attn_residual"
    elif operation.kind is Kind.ACTIVATION and part == "input":
        short = f"{path.rpartition('.')[0]}.act"
    else:
        return plain
    return plain if short in given else short


def _with_caches(operations: list[Operation], windows: Mapping[int, int]) -> Iterator[Operation]:
    """Before each attention, what a cache gives back of the keys and values that it reads."""
    by_tap = {operation.tap: operation for operation in operations}
    for operation in operations:
        if operation.kind is Kind.ATTENTION and operation.layer is not None:
            for name, written in zip(("k_cache", "v_cache"), operation.inputs[1:], strict=True):
                tap, shape = f"{prefix_of(operation.tap)}{name}", by_tap[written].shape
                window = operation.window or windows.get(operation.layer)
                yield Operation(tap=tap, kind=Kind.CACHE, inputs=(written,), shape=shape, window=window)
        yield operation
