"""Which of HF's values the modules of vLLM, nano-vllm and SGLang show: found from their kinds and the model's graph.

These engines share names: of modules, which they name after the checkpoint as HF does, and of the classes of their
layers (`QKVParallelLinear`, `RMSNorm`, `VocabParallelEmbedding`, ...). So no table is written for any family: every
module is asked for the names that its kind can show, and those that HF's graph knows are recorded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from harness.engines.torch_modules.table import Entry
from harness.engines.torch_modules.values import Attribute, Fields, Split, Value
from harness.formats.taps import Graph

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""HF's names of the parts of a fused module, if the model does not say them."""


def find_table(model: nn.Module, graph: Graph, *, fused_sizes: Callable[[nn.Module], Sequence[int]]) -> list[Entry]:
    """Return a line for every module that shows a tap of the graph; a tap that several show is taken from the first.

    `fused_sizes` returns the sizes of a fused linear's parts.
    """
    return list(_Table(model, graph, fused_sizes).entries())


class _Table:
    def __init__(self, model: nn.Module, graph: Graph, fused_sizes: Callable[[nn.Module], Sequence[int]]) -> None:
        self._modules, self._graph, self._fused_sizes = dict(model.named_modules()), graph, fused_sizes
        self._has_processor = any("LogitsProcessor" in _kinds(module) for module in self._modules.values())
        self._fused: Mapping[str, Any] = {**_FUSED, **getattr(model, "packed_modules_mapping", {})}
        self._taken: set[str] = set()

    def entries(self) -> Iterator[Entry]:
        """Yield the lines; products come first, since what they make is shown by nothing else as surely."""
        first = next((path for path in self._modules if path.endswith("layers.0")), None)
        for path, module in sorted(self._modules.items(), key=lambda each: "LinearBase" not in _kinds(each[1])):
            if path == first:  # the residual stream begins here, whatever is done to the embedding before
                yield Entry(module=path, inputs=self._named("hidden_states", f"{path}.input"))
                continue
            entry = self._entry(path, module, _kinds(module))
            if entry is not None and (entry.taps or entry.token_ids is not None):
                yield entry

    def _entry(self, path: str, module: nn.Module, kinds: set[str]) -> Entry | None:
        if "LogitsProcessor" in kinds or ("ParallelLMHead" in kinds and not self._has_processor):
            logits = self._tap(self._graph.logits)  # SGLang's processor returns an object that has them
            output = None if logits is None else Attribute("next_token_logits", logits)
            return Entry(module=path, output=output, is_sampled_only=True)
        if "ParallelLMHead" in kinds:
            return None  # it is the logits processor that applies it
        if "VocabParallelEmbedding" in kinds:
            return Entry(module=path, token_ids=0)
        if any(kind.endswith("Norm") for kind in kinds):
            return Entry(module=path, output=self._norm(path))
        if "LinearBase" in kinds:
            return Entry(module=path, inputs=self._named(0, f"{path}.input"), output=self._linear(path, module))
        if kinds & {"Attention", "RadixAttention"}:
            return self._attention(path)
        if path.endswith(".experts"):
            return Entry(module=path, output=self._tap(path))
        return None

    def _norm(self, path: str) -> Value | None:
        """Return what a norm shows: beside its result the residual that it has updated, which HF's norm is given."""
        normed, residual = self._tap(path), self._tap(f"{path}.input")
        return None if normed is None and residual is None else Fields(normed, residual)

    def _linear(self, path: str, module: nn.Module) -> Value | None:
        parent, _, name = path.rpartition(".")
        if name not in self._fused or path in self._graph:
            return self._tap(path)
        names = (f"{parent}.{part}" for part in self._fused[name])
        sizes = zip(names, self._fused_sizes(module), strict=True)
        return Split({self._tap(each) or each: size for each, size in sizes})

    def _attention(self, path: str) -> Entry:
        parent = path.rpartition(".")[0]
        inputs: dict[int | str, Value] = {}
        for place, name in enumerate(("query", "key", "value")):
            inputs |= self._named(place, f"{parent}.{name}")
        return Entry(module=path, inputs=inputs, output=self._tap(f"{parent}.context"))

    def _named(self, place: int | str, name: str) -> dict[int | str, Value]:
        tap = self._tap(name)
        return {} if tap is None else {place: tap}

    def _tap(self, name: str) -> str | None:
        """Return the tap of that name, once; None if HF's graph has none, or another module shows it."""
        tap = self._graph.canonical(name)
        if tap not in self._graph or tap in self._taken:
            return None
        self._taken.add(tap)
        return tap


def _kinds(module: nn.Module) -> set[str]:
    """Return the names of a module's class and of those that it is made of."""
    return {each.__name__ for each in type(module).__mro__}
