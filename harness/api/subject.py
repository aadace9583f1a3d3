"""The subject of a check: an engine's name, an engine, or a module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines import Engine, engine_names
from harness.errors import Code, HarnessError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.api.arguments import Dtype, Model
    from harness.plan import Plan

    Subject = str | Engine | nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The engine under test, and what it says of dtype and device."""

    name: str
    dtype: str | None
    """None for the checkpoint's own."""
    device: str | None
    open: Callable[[Path, str, str], Engine] | None = None
    """Returns the engine for a checkpoint, a dtype and a device; None for one that is opened by its name."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of an engine that is opened by its name."""
    checkpoint: str | None = None
    """Says what is right; None for the embedded default."""
    label: str | None = None
    """Name of the checkpoint in reports if that is not its path."""

    def changes(self) -> dict[str, Any]:
        """Return what the plan's case has in place of its own."""
        return {
            "model": self.checkpoint,
            "engine": self.name,
            "engine_options": self.options,
            "dtype": self.dtype,
            "device": self.device,
        }

    def opened(self, plan: "Plan") -> "Plan":
        """Return the plan with the engine itself if it is not opened by its name."""
        subject = self.open and self.open(plan.folder, plan.case.dtype, plan.case.device)
        return replace(plan.changed(model=self.label or plan.case.model), subject=subject)


def choose(
    engine: Any,
    *,
    dtype: "Dtype",
    device: "str | torch.device | None",
    options: Mapping[str, Any],
    names: Mapping[str, str] | None,
) -> Chosen:
    """Say what the first argument of `check` is.

    Raises:
        HarnessError: BAD_OPTION: it is nothing that can be checked, or an argument does not go with it; UNKNOWN_ENGINE
            for None.
    """
    from torch import nn

    from harness.api.arguments import dtype_name

    wanted, place = dtype_name(dtype), None if device is None else str(device)
    is_module = isinstance(engine, nn.Module)
    if names is not None and not is_module:
        _refuse_argument("names=", names, "names are for an nn.Module")
    if options and not isinstance(engine, str):
        _refuse_argument("engine_options=", dict(options), "options are for an engine that is opened by its name")
    if isinstance(engine, str):
        return Chosen(name=engine, dtype=None if wanted == "auto" else wanted, device=place)
    if is_module:
        return _chosen_module(engine, wanted, place, names)
    if isinstance(engine, Engine) and not isinstance(engine, type):
        return Chosen(
            name=str(engine.name),
            dtype=None if wanted == "auto" else wanted,
            device=place,
            open=lambda _folder, _dtype, _device: engine,
        )
    if callable(getattr(engine, "step", None)) and not isinstance(engine, type):
        return _chosen_stepper(engine, wanted, place)
    raise _no_engine(engine)


def model_or_own(engine: Any, model: "Model | None") -> "Model | None":
    """Return the model that says what is right: for a model object of HF's by default its own weights.

    Raises:
        HarnessError: BAD_OPTION: any other module needs to be told which checkpoint it is.
    """
    from torch import nn
    from transformers import PreTrainedModel

    if model is not None or not isinstance(engine, nn.Module):
        return model
    if isinstance(engine, PreTrainedModel):
        return engine
    raise HarnessError(
        Code.BAD_OPTION,
        "a module of your own needs the checkpoint that its weights come from",
        where="model=",
        actual=None,
        hint=f'harness.check(your_{type(engine).__name__.lower()}, model="path/to/checkpoint", ...)',
    )


def _chosen_module(module: "nn.Module", dtype: str, device: str | None, names: Mapping[str, str] | None) -> Chosen:
    from harness.engines.module import check_has_values, module_device, module_dtype, module_engine

    check_has_values(module)
    return Chosen(
        name=type(module).__name__,
        dtype=module_dtype(module, dtype),
        device=module_device(module, device),
        open=lambda folder, dtype, device: module_engine(
            module, folder=folder, dtype=dtype, device=device, names=names
        ),
    )


def _chosen_stepper(engine: Any, dtype: str, device: str | None) -> Chosen:
    """Return an engine that has steps alone: its dtype is that of its modules."""
    from harness.engines.by_content import StepEngine, module_paths
    from harness.engines.module import module_dtype

    dtypes = (module_dtype(module, dtype) for module in module_paths(engine))
    name = type(engine).__name__
    return Chosen(
        name=name,
        dtype=next((own for own in dtypes if own is not None), None if dtype == "auto" else dtype),
        device=device,
        open=lambda folder, dtype, _device: StepEngine(lambda: engine, name=name, folder=folder, dtype=dtype),
    )


def _no_engine(engine: Any) -> HarnessError:
    if engine is None:
        return HarnessError(
            Code.UNKNOWN_ENGINE,
            "no engine was given",
            where="the first argument",
            expected=f"an nn.Module, an engine, or one of {', '.join(engine_names())}",
            actual=None,
            hint='harness.check("reference")',
        )
    if isinstance(engine, type):
        what, hint = f"{engine.__name__} is a class, not an object of it", f"{engine.__name__}(...)"
    else:
        what, hint = "this is nothing that can be checked", "docs/write-an-adapter.md shows an engine"
    return HarnessError(
        Code.BAD_OPTION,
        what,
        where="the first argument",
        expected="an nn.Module, an engine's name, or an object with name, capabilities and run",
        actual=repr(engine)[:80],
        hint=hint,
    )


def _refuse_argument(where: str, actual: object, what: str) -> None:
    raise HarnessError(Code.BAD_OPTION, what, where=where, actual=actual, hint=f"leave {where} out")
