"""The graph of a model's operations: what each value that its forward showed is, by what was run to compute it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from harness.errors import Code, HarnessError
from harness.formats.taps import LOGITS, Graph, Kind, Operation, layer_of, prefix_of, site_of
from harness.oracle.caches import TracedState, cache_windows, keeps_states, traced_states
from harness.oracle.trace import ForwardTrace, Shown, trace
from harness.oracle.untraced import UntracedModel
from harness.oracle.watch import LATENTS

_ACTIVATIONS = frozenset({"activation", "silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "hardswish", "mish"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear"})
_NORMS = frozenset({"rsqrt", "native_layer_norm", "rms_norm", "_fused_rms_norm", "linalg_vector_norm"})
_SCALINGS = frozenset({"mul", "div"})
_INTERFACE = ("query", "key", "value")
_ROTATED = ("query", "key", LATENTS[1])


def trace_graph(hf: UntracedModel) -> Graph:
    """Run the model over a few tokens and return its operations in the order of the run.

    Raises:
        HarnessError: UNSUPPORTED_ARCHITECTURE: the model is no decoder.
    """
    seen = trace(hf)
    if seen.aliases.get("logits", "logits") not in seen.shown:
        raise HarnessError(
            Code.UNSUPPORTED_ARCHITECTURE,
            "the model is no causal language model: logits of a position depend on the tokens after it",
            where=hf.folder,
            expected="a decoder, whose rows depend on what is before them",
            actual=type(hf.model).__name__,
        )
    graph = _named(hf, seen)
    if not keeps_states(hf):
        return graph
    return replace(graph, operations=tuple(_with_states(graph.operations, traced_states(hf))))


def _named(hf: UntracedModel, seen: ForwardTrace) -> Graph:
    """Give every value its kind, its inputs and its name."""
    operations = [
        Operation(
            tap=item.source,
            kind=_kind(item),
            inputs=item.origin.sources,
            source=item.source,
            shape=tuple(item.rows.shape[1:]) if item.num_chosen is None else (item.num_chosen,),
            token_dim=item.token_dim,
            among_tokens=item.num_chosen is not None,
            tokens_ahead=hf.tokens_ahead(item.source.partition(":")[0]),
        )
        for item in seen.shown.values()
    ]
    operations = _without_parts([_attention(operation, seen) for operation in operations])
    names = _names(hf, operations, seen.aliases)
    renamed = [
        replace(op, tap=names[op.source], inputs=tuple(names[source] for source in op.inputs)) for op in operations
    ]
    last_layer = max((at for at, op in enumerate(renamed) if op.layer is not None), default=-1)
    renamed = [
        replace(op, sampled_only=(behind := at > last_layer >= 0), is_head=behind and not _is_in_body(hf, op))
        for at, op in enumerate(renamed)
    ]
    others = {alias: names[source] for alias, source in seen.aliases.items() if source in names}
    others |= {source: name for source, name in names.items() if source != name}
    others |= {source.replace(":", "."): name for source, name in others.items()}
    others = {alias: name for alias, name in others.items() if alias not in names.values()}
    return Graph(tuple(_with_caches(renamed, others, cache_windows(hf))), others)


def _attention(operation: Operation, seen: ForwardTrace) -> Operation:
    """Attention reads query, key and value of its own interface, and nothing else (masks are computed, too)."""
    if operation.kind is not Kind.ATTENTION:
        return operation
    parts = [f"{operation.module}:{part}" for part in _INTERFACE]
    inputs = tuple(seen.aliases.get(part, part) for part in parts)
    is_among_tokens = operation.token_dim == 1  # as HF's interface returns it: else among layers, for example
    if not is_among_tokens or not set(inputs) <= set(seen.shown):  # keys that are none of the tokens', compressed ones
        return replace(operation, kind=Kind.OTHER)
    return replace(operation, inputs=inputs, window=seen.windows.get(operation.module))


def _without_parts(operations: list[Operation]) -> list[Operation]:
    """Leave out what is a mere part of another value, but for what attention reads or caches."""
    parts = {
        op.source: op.inputs
        for op in operations
        if op.kind is Kind.COPY and len(op.inputs) == 1 and op.source.partition(":")[2] not in (*_INTERFACE, *LATENTS)
    }

    def whole(source: str) -> tuple[str, ...]:
        return tuple(item for part in parts[source] for item in whole(part)) if source in parts else (source,)

    return [
        replace(op, inputs=tuple(dict.fromkeys(item for source in op.inputs for item in whole(source))))
        for op in operations
        if op.source not in parts
    ]


def _kind(value: Shown) -> Kind:
    """Tell what an operation is from what was run for it."""
    ran, sources = set(value.origin.operations), value.origin.sources
    part = value.source.partition(":")[2].partition("@")[0]
    if part == "topk":
        return Kind.CHOICE
    if part == "context":
        return Kind.ATTENTION
    if part in _ROTATED and ran - _SCALINGS:
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


def _names(hf: UntracedModel, operations: list[Operation], aliases: dict[str, str]) -> dict[str, str]:
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


def _is_in_body(hf: UntracedModel, operation: Operation) -> bool:
    """Whether the model without its head computes it."""
    return operation.source.startswith(f"{hf.model.base_model_prefix}.")


def _path_of(hf: UntracedModel, module: nn.Module | None) -> str:
    return next((path for path, item in hf.model.named_modules() if item is module), "")


def _short_name(operation: Operation, layers: set[str], taken: set[str], head: str) -> str:
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
    return plain if short in taken else short


def _with_caches(
    operations: list[Operation], aliases: Mapping[str, str], windows: Mapping[int, int]
) -> Iterator[Operation]:
    """Before each attention, what a cache gives back of the keys and values that it reads, or of their latents."""
    by_tap = {operation.tap: operation for operation in operations}
    for operation in operations:
        if operation.kind is Kind.ATTENTION and operation.layer is not None:
            latents = [aliases[name] for part in LATENTS if (name := f"{operation.module}:{part}") in aliases]
            held = latents if len(latents) == len(LATENTS) else operation.inputs[1:]
            for name, written in zip(("k_cache", "v_cache"), held, strict=True):
                tap, shape = f"{prefix_of(operation.tap)}{name}", by_tap[written].shape
                window = operation.window or windows.get(operation.layer)
                yield Operation(
                    tap=tap,
                    kind=Kind.CACHE,
                    inputs=(written,),
                    shape=shape,
                    window=window,
                    tokens_ahead=operation.tokens_ahead,
                )
        yield operation


def _with_states(operations: tuple[Operation, ...], states: Sequence[TracedState]) -> Iterator[Operation]:
    """After the last operation of each mixer, what a cache holds of its states."""
    paths = {state.path for state in states}
    inside = {path: [op for op in operations if f"{op.module}.".startswith(f"{path}.")] for path in paths}
    for operation in operations:
        yield operation
        for state in (item for item in states if inside[item.path][-1:] == [operation]):
            yield Operation(
                tap=f"{prefix_of(operation.tap)}{state.name}",
                kind=Kind.STATE,
                inputs=inside[state.path][0].inputs,
                source=f"{state.path}:{state.name}",
                shape=state.shape,
            )
