"""An `nn.Module` as an engine, without an entry point: HF's own classes, or a user's own."""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from harness.engines.adapter import Engine, Workload
from harness.engines.by_content import StepEngine
from harness.engines.declared import declared_numerics
from harness.engines.hf import HFEngine
from harness.engines.hf_batch import ShownTap
from harness.engines.module.engine import TorchEngine, operation_of
from harness.engines.module.forward import ModuleStepper, evaluating
from harness.errors import Code, HarnessError
from harness.formats.case import DTYPES
from harness.formats.checkpoint import Checkpoint
from harness.formats.recording import RecordingWriter
from harness.formats.taps import Graph
from harness.oracle.model import HFModel
from harness.oracle.trace import unmistakable_sizes
from harness.oracle.watch import Seeing, as_rows, token_dim, watching

__all__ = ["TorchEngine", "check_has_values", "module_device", "module_dtype", "module_engine"]


def module_engine(
    module: nn.Module, *, folder: Path, dtype: str, device: str, names: Mapping[str, str] | None = None
) -> Engine:
    """Return the engine that runs a module.

    A model of HF's is run with its own cache, in batches and chunks, and its attention is watched. Any other module is
    run one request at a time; where its modules do not have the checkpoint's names, its tensors are identified by their
    content.

    Args:
        module: with its weights.
        folder: checkpoint of the model that it should be.
        dtype: of its weights.
        device: where it is.
        names: paths of its modules, and HF's paths of the same.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: it is compiled, or its forward cannot be called; BAD_OPTION: bad names.
    """
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            "the module is compiled, so that nothing between its input and its output can be seen",
            where=type(module).__name__,
            expected="a module before torch.compile",
            hint="pass the module that was compiled",
        )
    if names is None and isinstance(module, PreTrainedModel) and _is_called_as_hf(module):
        dtypes = getattr(torch, dtype)
        checkpoint, where = Checkpoint(folder), torch.device(device)
        return HFObjectEngine(HFModel(model=module, checkpoint=checkpoint, dtype=dtypes, device=where))
    if names is None and not _has_names_of(Checkpoint(folder), module):
        stepper = ModuleStepper(module, torch.device(device))
        return StepEngine(lambda: stepper, name=type(module).__name__, folder=folder, dtype=dtype)
    return TorchEngine(module, device=device, names=names)


def _has_names_of(checkpoint: Checkpoint, module: nn.Module) -> bool:
    """Whether most weights of a checkpoint are called so in a module, too."""
    module_names = {name for name, _ in module.named_parameters()}
    return 2 * sum(name in module_names for name in checkpoint.tensors) >= len(checkpoint.tensors)


def _is_called_as_hf(model: PreTrainedModel) -> bool:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or {"input_ids", "use_cache"} <= set(parameters)


Device = str | torch.device | None


def module_dtype(module: nn.Module, wanted: str = "auto", *, may_cast: bool = False) -> str | None:
    """Return the dtype that most elements of a module's weights have; None for a module without weights.

    Args:
        module: any.
        wanted: one of `case.DTYPES`, or `auto` for the module's own.
        may_cast: whether weights in float32 may be wanted in 16 bits, as they are multiplied under `torch.autocast`.

    Raises:
        HarnessError: BAD_OPTION: the module has another one than is wanted; ENGINE_CANNOT_SERVE: it has one that there
            is no oracle for, or its weights are on the meta device.
    """
    counts = Counter[torch.dtype]()
    for _, tensor in _weights(module):
        counts[tensor.dtype] += tensor.numel()
    if not counts:
        return None if wanted == "auto" else wanted
    name = str(counts.most_common(1)[0][0]).removeprefix("torch.")
    if name not in DTYPES:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"the module computes in {name}",
            where=type(module).__name__,
            expected=" or ".join(DTYPES),
            actual=name,
            hint="module.float(), or another dtype of these",
        )
    if may_cast and name == "float32" and wanted != "auto":
        return wanted
    if wanted not in ("auto", name):
        autocast = "" if may_cast or name != "float32" else "; under autocast: an object with a step that runs it so"
        raise HarnessError(
            Code.BAD_OPTION,
            "the module's weights have another dtype than was asked for",
            where=f"dtype= of {type(module).__name__}",
            expected=wanted,
            actual=name,
            hint=f'dtype="{name}", or convert the module: module.to(torch.{wanted}){autocast}',
        )
    return name


def module_device(module: nn.Module, wanted: Device = None) -> str | None:
    """Return the device of a module's weights; None for a module without weights and without a wanted device.

    Args:
        module: any.
        wanted: a device, which may leave its number out; None for the module's own.

    Raises:
        HarnessError: BAD_OPTION: the module is on another device; ENGINE_CANNOT_SERVE: it is on several.
    """
    devices = list(dict.fromkeys(tensor.device for _, tensor in _weights(module)))
    if len(devices) > 1:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            "the module's weights are on several devices",
            where=type(module).__name__,
            expected="one device",
            actual=", ".join(map(str, devices)),
            hint=f'module.to("{devices[0]}")',
        )
    if not devices:
        return None if wanted is None else str(wanted)
    if wanted is not None and not _is_same(_device(wanted), devices[0]):
        raise HarnessError(
            Code.BAD_OPTION,
            "the module is on another device than was asked for",
            where=f"device= of {type(module).__name__}",
            expected=wanted,
            actual=devices[0],
            hint=f'module.to("{wanted}"), or leave device= out',
        )
    return str(devices[0])


def check_has_values(module: nn.Module) -> None:
    """Refuse a module whose weights have no values.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: a weight is on the meta device.
    """
    names = [name for name, tensor in _weights(module) if tensor.is_meta]
    if names:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"{len(names)} weights of the module are on the meta device, without values",
            where=f"{type(module).__name__}.{names[0]}",
            expected="weights that are loaded",
            actual="meta",
            hint="load the checkpoint into the module first: module.to_empty(...), then load_state_dict",
        )


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, weight) for name, weight in module.named_parameters() if weight.is_floating_point())


def _device(name: str | torch.device) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise HarnessError(
            Code.BAD_OPTION, f"unknown device {name!r}", where="device=", expected="cpu or cuda", actual=name
        ) from None


def _is_same(wanted: torch.device, actual: torch.device) -> bool:
    return wanted.type == actual.type and wanted.index in (None, actual.index)


class HFObjectEngine(HFEngine):
    """Runs a model object, some modules of which may not be HF's.

    Its taps are those of HF's own model that it shows under the same paths; the others are not offered.
    """

    def __init__(self, hf: HFModel) -> None:
        """Take a model that is loaded."""
        super().__init__(hf, attention=None)
        self.name = type(hf.model).__name__

    def match_taps(self, graph: Graph) -> None:
        """See `TapMatcher.match_taps`."""
        self._hf.graph = graph  # HF's own: the object's may lack what it does not compute
        self.sources = self._find(graph)
        taps = {shown.operation.tap for shown in self.sources.values()}
        self.capabilities = replace(
            self.capabilities,
            unsupported_taps=graph.not_shown(taps),
            numerics=declared_numerics(self._hf.model, graph),
        )

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """See `Engine.run`."""
        with evaluating(self._hf.model), _failures_are_the_engines():
            super().run(workload, writer)

    def _find(self, graph: Graph) -> dict[str, ShownTap]:
        """Run the model over a few tokens and return where it shows each tap first."""
        num_requests, (num_tokens, _) = unmistakable_sizes(self._hf)
        shape = num_requests, num_tokens
        sources, taps = dict[str, ShownTap](), set[str]()

        def see(source: str, value: torch.Tensor) -> None:
            operation, dim = operation_of(graph, source), token_dim(value, *shape)
            if operation is None or dim is None or operation.tap in taps:
                return
            if operation.tap == graph.logits and source != "logits":
                return  # the logits are what the model returns
            if as_rows(value, dim, *shape)[0].numel() == prod(operation.shape):
                taps.add(operation.tap)
                sources[source] = ShownTap(operation, dim)

        vocabulary = graph[graph.logits].shape[-1]
        ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(self._hf.device)
        with evaluating(self._hf.model), watching(self._hf) as watch, watch.showing(Seeing(see)):
            see("logits", self._hf.model(input_ids=ids, use_cache=False).logits)
        return sources


@contextmanager
def _failures_are_the_engines() -> Iterator[None]:
    """Raise what HF's code raised, without the error that blames HF: here the engine under test called that code."""
    try:
        yield
    except HarnessError as error:
        if error.code is Code.HF_FAILED and error.__cause__ is not None:
            raise error.__cause__ from None
        raise
