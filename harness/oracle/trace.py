"""The graph of a model's operations, traced from HF's own forward over a few tokens.

Each value that HF shows is a tap if something was computed since the last one; what is shown twice, or moved in
between, is one tap with several names. What an operation is follows from what was run to compute it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from harness.oracle.flow import Flow, Origin, following
from harness.oracle.model import HFModel
from harness.oracle.rows import token_dim
from harness.oracle.watch import CHOICE, Seeing, watching
from harness.taps import LOGITS, Graph, Kind, Operation, layer_of, prefix_of, site_of

_BATCH = 2
_ACTIVATIONS = frozenset({"activation", "silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "hardswish", "mish"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear"})
_NORMS = frozenset({"rsqrt", "native_layer_norm", "rms_norm", "_fused_rms_norm", "linalg_vector_norm"})
_INTERFACE = ("query", "key", "value")
_ACTIVATION_FILES = ("transformers.activations", "torch.nn.modules.activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """One value as HF's run shows it."""

    source: str
    origin: Origin
    token_dim: int
    width: int
    """Elements of a row."""


@torch.no_grad()
def trace_graph(hf: HFModel) -> Graph:
    """Run the model over a few tokens and return its operations in the order of the run."""
    num_tokens = _unmistakable_length(hf)
    ids = torch.arange(_BATCH * num_tokens, device=hf.device).view(_BATCH, num_tokens) % hf.vocab_size
    shown: list[_Shown] = []
    kept: list[torch.Tensor] = []
    """All values: a storage that is given back could be taken for the one that comes after it."""
    aliases: dict[str, str] = {}

    def note(source: str, value: torch.Tensor) -> None:
        dim = token_dim(value, _BATCH, num_tokens)
        if dim is None:
            return
        kept.append(value)
        origin, width = flow.of(value), value.numel() // (_BATCH * num_tokens)
        same = _shown_already(origin, width, shown, aliases)
        if same is not None and CHOICE not in source:
            aliases[source] = same
            return
        shown.append(_Shown(source=source, origin=origin, token_dim=dim, width=width))
        flow.mark(value, Origin((source,)))

    with ExitStack() as stack:
        watch = stack.enter_context(watching(hf))
        stack.enter_context(all_parts_held(hf))
        flow = stack.enter_context(following())
        stack.enter_context(_activations_noted(hf, flow))
        stack.enter_context(watch.showing(Seeing(note)))
        output = hf.model(input_ids=ids, use_cache=False)
        note("logits", output.logits)
    return _named(hf, shown, aliases)


def _unmistakable_length(hf: HFModel) -> int:
    """Return a number of tokens that is no size of the model's, so that a dimension of that size counts the tokens."""
    sizes = {size for parameter in hf.model.parameters() for size in parameter.shape}
    sizes |= {value for value in vars(hf.config).values() if isinstance(value, int)}
    return next(n for n in (11, 13, 17, 19, 23, 29, 31, 37, 41, 43) if not {n, n * _BATCH} & sizes)


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


def _shown_already(origin: Origin, width: int, shown: list[_Shown], aliases: dict[str, str]) -> str | None:
    """Return the value that this one is, as a whole and only moved; None where it is another."""
    if len(origin.sources) != 1 or origin.operations:
        return None
    (source,) = origin.sources
    same = aliases.get(source, source)
    return same if any(each.source == same and each.width == width for each in shown) else None


def _named(hf: HFModel, shown: list[_Shown], aliases: dict[str, str]) -> Graph:
    """Give every value its kind, its inputs and its name."""
    operations = [
        Operation(
            tap=each.source,
            kind=_kind(each),
            inputs=each.origin.sources,
            source=each.source,
            token_dim=each.token_dim,
        )
        for each in shown
    ]
    operations = _without_parts([_attention_inputs(operation, aliases) for operation in operations])
    names = _names(hf, operations)
    renamed = [
        replace(op, tap=names[op.source], inputs=tuple(names[source] for source in op.inputs)) for op in operations
    ]
    last_layer = max((at for at, op in enumerate(renamed) if op.layer is not None), default=-1)
    renamed = [replace(op, sampled_only=at > last_layer >= 0) for at, op in enumerate(renamed)]
    others = {alias: names[source] for alias, source in aliases.items() if source in names}
    others |= {source: name for source, name in names.items() if source != name}
    others |= {source.replace(":", "."): name for source, name in others.items()}
    return Graph(tuple(_with_caches(renamed)), others)


def _attention_inputs(operation: Operation, aliases: dict[str, str]) -> Operation:
    """Attention reads query, key and value of its own interface, and nothing else (masks are computed, too)."""
    if operation.kind is not Kind.ATTENTION:
        return operation
    parts = [f"{operation.module}:{part}" for part in _INTERFACE]
    return replace(operation, inputs=tuple(aliases.get(part, part) for part in parts))


def _without_parts(operations: list[Operation]) -> list[Operation]:
    """Leave out what is a mere part of another value, but for what attention reads: who reads it reads the whole."""
    parts = {
        op.source: op.inputs
        for op in operations
        if op.kind is Kind.COPY and op.source.partition(":")[2] not in _INTERFACE
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
    is_output = part in ("", "linear")
    if is_output and len(sources) == 1 and len(ran & _PRODUCTS) == 1 and not ran - _PRODUCTS - {"add", "addmm"}:
        return Kind.LINEAR
    if is_output and len(sources) == 1 and ran & _NORMS and not ran & _PRODUCTS:
        return Kind.NORM
    if ran == {"add"} and len(sources) == 2:
        return Kind.ADD
    if ran & _ACTIVATIONS and not ran - _ACTIVATIONS - {"mul"}:
        return Kind.ACTIVATION
    return Kind.OTHER


def _names(hf: HFModel, operations: list[Operation]) -> dict[str, str]:
    """Return the name of each value: its source, or the shorter one of schema 1 where the layer has such a value."""
    names: dict[str, str] = {}
    taken = {operation.source for operation in operations}
    layers = {path for path in hf.parts if layer_of(f"{path}.x") is not None and not site_of(f"{path}.x")[1:]}
    head = _path_of(hf, hf.model.get_output_embeddings())
    for operation in operations:
        wanted = _short_name(operation, layers, set(names.values()), head)
        is_free = wanted not in taken - {operation.source} and wanted not in names.values()
        names[operation.source] = wanted if is_free else operation.source.replace(":", ".")
    return names


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


def _with_caches(operations: list[Operation]) -> Iterator[Operation]:
    """Before each attention, what a cache gives back of the keys and values that it reads."""
    for operation in operations:
        if operation.kind is Kind.ATTENTION and operation.layer is not None:
            for name, written in zip(("k_cache", "v_cache"), operation.inputs[1:], strict=True):
                yield Operation(tap=f"{prefix_of(operation.tap)}{name}", kind=Kind.CACHE, inputs=(written,))
        yield operation
