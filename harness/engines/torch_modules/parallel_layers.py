"""Which of HF's values the modules of vLLM, nano-vllm and SGLang show: found from their kinds and the model's graph.

These engines share names: of modules, which they name after the checkpoint as HF does, and of the classes of their
layers (`QKVParallelLinear`, `RMSNorm`, `VocabParallelEmbedding`, ...). So no table is written for any family: every
module is asked for the names that its kind can show, and those that HF's graph knows are recorded.

A class's name does not say all: a norm returns its result, or that and the residual that it has updated; a module is
there for its weights and is never called. One forward shows how the modules are called. Only shapes are kept, and
whether a field is handed through: no value is compared with HF's, so no wrong value can take a tap out of a check. A
value that is not shown flows through HF's own modules, and is judged at the next tap after it.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from harness.engines.torch_modules.table import Attribute, Entry, Fields, Split, Value
from harness.formats.taps import Graph, Kind, layer_of, prefix_of, site_of

Shape = tuple[int, ...] | None
"""Of a tensor; None for what is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """Shapes of what a module was given and returned."""

    places: tuple[Shape, ...]
    """Arguments by place."""
    names: Mapping[str, Shape]
    """All arguments by name."""
    outputs: tuple[Shape, ...]
    """What it returned: the fields of a tuple, or the one value. None, too, for a field after the first that is an
    argument as it was given: a residual that is handed through, and has not been added."""

    @property
    def is_single(self) -> bool:
        """Whether it returned one tensor of its own."""
        return all(shape is None for shape in self.outputs[1:])

    def argument(self, place: int | str) -> Shape:
        """Return the shape of an argument; None if there is none."""
        if isinstance(place, str):
            return self.names.get(place)
        return self.places[place] if place < len(self.places) else None


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of a forward's modules."""

    num_rows: int
    """Tokens of the forward."""
    by_path: Mapping[str, ModuleCall]
    """Of modules that were called once."""

    def to_json(self) -> dict[str, Any]:
        """Return the calls as what JSON can hold, for another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the calls of `to_json`."""
        return cls(data["num_rows"], {path: ModuleCall(**call) for path, call in data["by_path"].items()})

    def holds(self, shape: Shape, row: tuple[int, ...]) -> bool:
        """Whether a tensor has a row of that shape, in any layout of its elements, for each token of the forward."""
        if shape is None or not shape:
            return False
        num_elements = self.num_rows * torch.Size(row).numel()
        rows_first = shape[0] % self.num_rows == 0 or tuple(shape[:2]) == (1, self.num_rows)
        return rows_first and torch.Size(shape).numel() == num_elements


@contextmanager
def watched_calls(model: nn.Module, *, num_rows: int) -> Iterator[list[Calls]]:
    """Watch the one forward of so many tokens that the block runs; the list gets its calls at the block's end."""
    seen: dict[str, list[ModuleCall]] = {}
    watched: list[Calls] = []
    with ExitStack() as stack:
        for path, module in model.named_modules():
            arguments: list[torch.Tensor] = []
            before, after = partial(_keep, arguments), partial(_note, seen.setdefault(path, []), arguments)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield watched
    watched.append(Calls(num_rows, {path: calls[0] for path, calls in seen.items() if len(calls) == 1}))


def _keep(kept: list[torch.Tensor], _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Keep a module's arguments as they are before the call, which may change them in place."""
    kept[:] = [value.clone() for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def _note(
    calls: list[ModuleCall],
    arguments: list[torch.Tensor],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Any,
) -> None:
    first, *others = output if isinstance(output, tuple | list) and output else (output,)
    others = [None if any(_is_same(value, item) for item in arguments) else value for value in others]
    by_place = dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
    calls.append(
        ModuleCall(
            places=tuple(map(_shape, args)),
            names={name: _shape(value) for name, value in {**by_place, **kwargs}.items()},
            outputs=tuple(map(_shape, (first, *others))),
        )
    )
    arguments.clear()


def _is_same(value: Any, argument: torch.Tensor) -> bool:
    """Whether a value is what was given; zeros do not tell, since zeros may have been added."""
    is_tensor = isinstance(value, torch.Tensor) and value.dtype == argument.dtype
    return is_tensor and bool(value.any()) and torch.equal(value, argument)


def _shape(value: Any) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""HF's names of the parts of a fused module, if the model does not say them."""


def find_table(
    model: nn.Module, graph: Graph, *, fused_sizes: Callable[[nn.Module], Sequence[int]], calls: Calls | None = None
) -> list[Entry]:
    """Return a line for every module that shows a tap of the graph; a tap that several show is taken from the first.

    Args:
        model: of the engine.
        graph: of HF's model.
        fused_sizes: returns the sizes of a fused linear's parts.
        calls: of a forward of the model: what its modules show follows from what they were given and returned. Without
            them their classes decide.
    """
    return list(_Table(model, graph, fused_sizes, calls).entries())


class _Table:
    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        fused_sizes: Callable[[nn.Module], Sequence[int]],
        calls: Calls | None,
    ) -> None:
        self._modules, self._graph, self._fused_sizes = dict(model.named_modules()), graph, fused_sizes
        self._calls = calls
        self._has_processor = any("LogitsProcessor" in _kinds(module) for module in self._modules.values())
        self._fused: Mapping[str, Any] = {**_FUSED, **getattr(model, "packed_modules_mapping", {})}
        self._taken: set[str] = set()
        self._bases = _base(self._modules), _base(op.tap for op in graph)

    def entries(self) -> Iterator[Entry]:
        """Yield the lines; products come first, since what they make is shown by nothing else as surely.

        Then norms that add to a residual: what comes before such a one returns the stream without its last part, though
        the first layer may look as if it returned it whole (Mamba-2's hands the embedding through beside it).
        Then layers: the residual stream begins in the first, whatever is done to the embedding before.
        """
        for path, module in sorted(self._modules.items(), key=lambda item: self._rank(*item)):
            if self._calls is not None and path not in self._calls.by_path:
                continue  # it is there for its weights, or is called several times in a step
            entry = self._layer(path) if _is_layer(path) else self._entry(path, module, _kinds(module))
            if entry is not None and (entry.taps or entry.token_ids is not None):
                yield entry

    def _rank(self, path: str, module: nn.Module) -> int:
        call = None if self._calls is None else self._calls.by_path.get(path)
        adds = call is not None and not call.is_single and any(kind.endswith("Norm") for kind in _kinds(module))
        return 0 if "LinearBase" in _kinds(module) else 1 if adds else 2 if _is_layer(path) else 3

    def _layer(self, path: str) -> Entry | None:
        """Return what a decoder layer shows: the stream that the first is given, and what each returns if that is all.

        Of a pair nothing is taken: the residual is still to be added.
        """
        inputs = self._argument_tap(path, "hidden_states", f"{path}.input") if layer_of(f"{path}.x") == 0 else {}
        is_whole = self._calls is not None and self._calls.by_path[path].is_single
        output = self._returned(path, path) if is_whole else None
        return Entry(module=path, inputs=inputs, output=output) if inputs or output else None

    def _entry(self, path: str, module: nn.Module, kinds: set[str]) -> Entry | None:
        if "LogitsProcessor" in kinds or ("ParallelLMHead" in kinds and not self._has_processor):
            logits = self._tap(self._graph.logits)  # SGLang's processor returns an object that has them
            output = None if logits is None else Attribute("next_token_logits", logits)
            return Entry(module=path, output=output, is_sampled_only=True)
        if "ParallelLMHead" in kinds:
            return None  # it is the logits processor that applies it
        if "VocabParallelEmbedding" in kinds:
            shows = self._calls is not None and self._is_first(path)
            return Entry(module=path, token_ids=0, output=self._returned(path, path) if shows else None)
        if any(kind.endswith("Norm") for kind in kinds):
            return self._norm(path)
        if "LinearBase" in kinds:
            return Entry(
                module=path, inputs=self._argument_tap(path, 0, f"{path}.input"), output=self._linear(path, module)
            )
        if kinds & {"Attention", "RadixAttention"}:
            return self._attention(path)
        if path.endswith(".experts"):
            return Entry(module=path, output=self._experts(path, module))
        return None

    def _is_first(self, path: str) -> bool:
        """Whether HF's graph begins with a module. What a further one gives HF may scale, and engines later."""
        return self._graph.canonical(self._hf_name(path)) == next(iter(self._graph)).tap

    def _norm(self, path: str) -> Entry:
        """Return what a norm shows: its result, and what HF's norm is given.

        That is the residual which the norm has updated and returns; or its argument, where it updates none.
        """
        if self._calls is not None and self._calls.by_path[path].is_single:
            return Entry(
                module=path, inputs=self._argument_tap(path, 0, f"{path}.input"), output=self._returned(path, path)
            )
        normed, residual = self._returned(path, path), self._returned(path, f"{path}.input", field=1)
        return Entry(module=path, output=None if normed is None and residual is None else Fields(normed, residual))

    def _linear(self, path: str, module: nn.Module) -> Value | None:
        parent, _, name = path.rpartition(".")
        is_product_of_hf = self._hf_name(path) in self._graph
        if is_product_of_hf and "QKVParallelLinear" in _kinds(module):
            return None  # HF's product is fused, too, often head by head; here all queries come first
        if name not in self._fused or is_product_of_hf:
            return self._returned(path, path)
        names = [f"{parent}.{part}" for part in self._fused[name]]
        sizes = self._fused_sizes(getattr(module, "base_layer", module))
        if len(names) != len(sizes):  # which part is what is not said: Lfm2-MoE's in_proj has three parts and one name
            return None
        return Split({self._tap(item) or item: size for item, size in zip(names, sizes, strict=True)})

    def _attention(self, path: str) -> Entry:
        parent = path.rpartition(".")[0]
        inputs: dict[int | str, Value] = {}
        for place, name in enumerate(("query", "key", "value")):
            if not self._is_scaled(f"{parent}.{name}"):
                inputs |= self._argument_tap(path, place, f"{parent}.{name}")
        return Entry(module=path, inputs=inputs, output=self._returned(path, f"{parent}.context"))

    def _is_scaled(self, name: str) -> bool:
        """Whether HF scales what its attention is given, and does no more: these engines scale inside of attention.

        The context is judged then, and HF's own scaling of what the projection was seen to make.
        """
        tap = self._graph.canonical(self._hf_name(name))
        return tap in self._graph and self._graph[tap].kind is Kind.OTHER

    def _experts(self, path: str, module: nn.Module) -> Value | None:
        """Return what experts show: with shared experts inside of them, they make what HF's whole block does."""
        has_shared = getattr(module, "shared_experts", None) is not None
        return self._returned(path, path.rpartition(".")[0] if has_shared else path)

    def _argument_tap(self, path: str, place: int | str, name: str) -> dict[int | str, Value]:
        """Return the tap of an argument by its place, if it has the shape of one."""
        call = None if self._calls is None else self._calls.by_path[path]
        tap = self._tap(name, None if call is None else (call.argument(place),))
        return {} if tap is None else {place: tap}

    def _returned(self, path: str, name: str, *, field: int = 0) -> str | None:
        """Return the tap of what a module returns, if that has the shape of one."""
        call = None if self._calls is None else self._calls.by_path[path]
        return self._tap(name, None if call is None else call.outputs[field : field + 1])

    def _hf_name(self, name: str) -> str:
        """Return a name in HF's model, whose body may be called otherwise (`gpt_neox` for `model`)."""
        engine, hf = self._bases
        return hf + name.removeprefix(engine) if engine and hf and name.startswith(engine) else name

    def _tap(self, name: str, shapes: Sequence[Shape] | None = None) -> str | None:
        """Return the tap of that name, once; None if HF's graph has none, another module shows it, or no shape fits."""
        tap = self._graph.canonical(self._hf_name(name))
        if tap not in self._graph or tap in self._taken:
            return None
        if self._calls is not None and shapes is not None:
            row = self._graph[tap].shape
            if not any(self._calls.holds(shape, row) for shape in shapes):
                return None
        self._taken.add(tap)
        return tap


def _base(paths: Iterable[str]) -> str:
    """Return what stands before the list of decoder layers: `model.`, `transformer.`; nothing if there is no layer."""
    first = next((prefix_of(f"{path}.x") for path in paths if layer_of(f"{path}.x") == 0), "")
    return first.removesuffix(".0.").rpartition(".")[0] + "." if first else ""


def _is_layer(path: str) -> bool:
    return layer_of(f"{path}.x") is not None and site_of(f"{path}.x") == "x"


def _kinds(module: nn.Module) -> set[str]:
    """Return the names of a module's class and of those that it is made of; of what a wrapper (for LoRA) is around."""
    wrapped = getattr(module, "base_layer", None)
    return {item.__name__ for item in type(module).__mro__} | (_kinds(wrapped) if wrapped is not None else set())
