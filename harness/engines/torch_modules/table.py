"""A line of the table, and the modules of an engine that it stands for."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from harness.engines.torch_modules.values import Value, taps_of, unfit

Argument = int | str
"""Place or name of an argument of a module's forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The value of HF's graph that a module shows."""

    module: str
    """Path in the engine, `{layer}` for the number: `model.layers.{layer}.self_attn.qkv_proj`. Where one module serves
    all layers (a rotary embedding, often), its calls in a step are counted."""
    output: Value | None = None
    inputs: Mapping[Argument, Value] = field(default_factory=dict)
    """Arguments as they are before the call."""
    updated: Mapping[Argument, Value] = field(default_factory=dict)
    """Arguments that the call changes in place, as they are after it."""
    token_ids: Argument | None = None
    """Of the embedding: where its token ids are, so that it is seen whether the forced tokens were fed."""
    is_sampled_only: bool = False
    """Whether it computes only the rows that tokens are sampled from."""

    @property
    def values(self) -> tuple[Value, ...]:
        """All values of the line."""
        return (*self.inputs.values(), *self.updated.values(), *(() if self.output is None else (self.output,)))

    @property
    def taps(self) -> tuple[str, ...]:
        """Templates of all taps of the line."""
        return tuple(tap for value in self.values for tap in taps_of(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A module and its line."""

    module: nn.Module
    path: str
    entry: Entry
    layers: tuple[int | None, ...]
    """Layers that it serves, in the order of its calls in a step; None outside of the layers."""


def bind(model: nn.Module, table: Sequence[Entry]) -> tuple[list[Binding], int]:
    """Find the modules of every line; return them and the number of layers.

    Raises:
        HarnessError: BAD_MODULE_TABLE: a line matches no module, two lines one module, or two lines name one tap.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    found = {entry.module: _matches(entry, paths) for entry in table}
    num_layers = 1 + max((layer for matches in found.values() for layer in matches if layer is not None), default=-1)
    _check_taps(table)
    bindings: dict[int, Binding] = {}
    for entry in table:
        by_module: dict[nn.Module, list[int | None]] = defaultdict(list)
        for layer, path in found[entry.module].items():
            by_module[paths[path]].append(layer)
        for module, layers in by_module.items():
            path = found[entry.module][layers[0]]
            if id(module) in bindings:
                raise unfit("two lines stand for one module", path, "one line", bindings[id(module)].entry.module)
            is_for_all = layers == [None] and any("{layer}" in tap or "{previous}" in tap for tap in entry.taps)
            served = tuple(range(num_layers)) if is_for_all else tuple(layers)
            bindings[id(module)] = Binding(module=module, path=path, entry=entry, layers=served)
    return list(bindings.values()), num_layers


def _matches(entry: Entry, paths: Mapping[str, nn.Module]) -> dict[int | None, str]:
    """Return the path of each layer's module, in the order of the layers."""
    before, is_layered, behind = entry.module.partition("{layer}")
    pattern = re.compile(re.escape(before) + (r"(\d+)" + re.escape(behind) if is_layered else ""), re.ASCII)
    hits = [(match, path) for path in paths if (match := pattern.fullmatch(path))]
    if not hits:
        near = entry.module.rpartition(".")[2]
        there = [path for path in paths if path.rpartition(".")[2] == near][:3]
        actual = ", ".join(there) or f"no module whose name ends in {near}"
        raise unfit("a line matches no module", entry.module, "the path of a module", actual)
    return dict(sorted((int(match[1]) if is_layered else None, path) for match, path in hits))


def _check_taps(table: Sequence[Entry]) -> None:
    owners: dict[str, str] = {}
    for entry in table:
        for tap in entry.taps:
            if tap in owners:
                raise unfit(f"two values have the name {tap}", entry.module, "one value for each tap", owners[tap])
            owners[tap] = entry.module
