"""Training from Python: rollouts against a trainer, and weights against weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.api.arguments import Dtype, Model, checkpoint, choose, engine_option_texts, named_as_arguments
from harness.base.progress import Progress
from harness.errors import Code, HarnessError
from harness.extensions.rollout.report import rollout_text
from harness.extensions.rollout.result import RolloutResult
from harness.report.document import document
from harness.results.check import Outcome

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.api.arguments import Subject
    from harness.extensions.rollout.format import Rollouts
    from harness.extensions.rollout.sides import Request
    from harness.plan import Plan

_HEADS = ("float32", "bfloat16", "float16")
_TRUTHS = ("auto", "float64", "float32")


class GapError(AssertionError):
    """A term of the gap is outside of its floor; the message is the whole result."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RolloutReport(RolloutResult):
    """The gap between trainer and engine. It is true if all of it is rounding."""

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def assert_ok(self) -> None:
        """Raise GapError (an AssertionError) unless tokens were compared and every term is inside of its floor."""
        __tracebackhide__ = True  # pytest shows the caller's line
        if not self:
            raise GapError(self.text())

    def text(self, *, width: int = 100) -> str:
        """Return what `harness rollout` prints."""
        return rollout_text(self, width=width)

    def as_dict(self) -> dict[str, Any]:
        """Return what `harness rollout --format json` prints."""
        return document(self)

    def __repr__(self) -> str:
        return f"<RolloutReport {self.outcome}: {self.rollouts}, {self.tokens.compared} tokens>"

    def __str__(self) -> str:
        return self.text()


def rollout(
    rollouts: "str | Path | Sequence[Mapping[str, Any]] | Rollouts",
    *,
    model: Model,
    trainer: "str | Path | nn.Module | None" = None,
    layout: str = "right",
    engine: "Subject | None" = None,
    engine_options: Mapping[str, object] | None = None,
    previous: str | Path | None = None,
    engine_weights: str | Path | None = None,
    head: str | None = None,
    weight_version: str | None = None,
    num_rows: int | None = None,
    dtype: Dtype = "auto",
    device: "str | torch.device | None" = None,
    truth: str = "auto",
    progress: Progress | None = None,
    local_files_only: bool = True,
) -> RolloutReport:
    """Split the gap between a trainer's and an engine's log probabilities in terms that add up.

    Args:
        rollouts: file of JSON lines or Parquet, or rows, with the fields of verl, TRL, OpenRLHF or slime
            (docs/rollouts.md); or what was read of them.
        model: checkpoint that both sides are meant to be: a folder, an embedded one by its name, or a model of HF's.
        trainer: the trainer's module, or a checkpoint that HF runs; None for what the log says of it.
        layout: how the trainer gets its rows: `alone`, `right` or `left` padded, `packed`.
        engine: name of an engine, or an engine, to run over the rows; None for what the log says of it.
        engine_options: of an engine that is opened by its name.
        previous: checkpoint with earlier weights, parts of which may be in use still.
        engine_weights: checkpoint with the engine's weights, where they are other than the model's.
        head: dtype that both sides mean to compute their head in; None for the model's own.
        weight_version: of the rows to compare; None where all rows are of one.
        num_rows: most rows to compare; None for all.
        dtype: that both sides compute in; `auto` for the checkpoint's own.
        device: where the model, and sides at hand, are run; None for the CPU.
        truth: precision of the truth: `float64`, `float32`, or `auto` for what the dtype needs.
        progress: called with what is being done, how much of it is done, and how much there is.
        local_files_only: never ask the model hub.

    Raises:
        HarnessError: a file cannot be used, or a side raised an exception.
    """
    arguments = dict(locals())
    with named_as_arguments():
        result = compare(arguments)
    return RolloutReport(**{field.name: getattr(result, field.name) for field in fields(result)})


def compare(arguments: Mapping[str, Any]) -> RolloutResult:
    """Return the result for the arguments of `rollout`; errors name options of the command line."""
    import torch

    from harness.extensions.rollout.format import Rollouts, read_rollouts
    from harness.extensions.rollout.live import LAYOUTS
    from harness.extensions.rollout.run import compare_rollouts
    from harness.extensions.rollout.sides import Request

    _check_choice("--layout", arguments["layout"], LAYOUTS)
    _check_choice("--head", arguments["head"], (None, *_HEADS))
    _check_choice("--truth", arguments["truth"], _TRUTHS)
    num_rows = arguments["num_rows"]
    if num_rows is not None and num_rows < 1:
        what = "too few rows to compare"
        raise HarnessError(Code.BAD_OPTION, what, where="--num-rows", expected="1 or more", actual=num_rows)
    read, is_local = arguments["rollouts"], arguments["local_files_only"]
    if not isinstance(read, Rollouts):
        read = read_rollouts(read, weight_version=arguments["weight_version"], num_rows=num_rows)
    kind = torch.device(arguments["device"] or "cpu").type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with (
        torch.autocast(kind, enabled=False),
        checkpoint(arguments["model"]) as (folder, label),
    ):  # it is the trainer's alone
        plan = _plan(folder, arguments)
        request = Request(
            model=label or plan.case.model,
            checkpoint=plan.checkpoint,
            dtype=plan.case.dtype,
            device=plan.case.device,
            truth=arguments["truth"],
            head=arguments["head"],
            module=arguments["model"] if isinstance(arguments["model"], torch.nn.Module) else None,
            layout=arguments["layout"],
            autocast=autocast,
            engine=None if arguments["engine"] is None else plan,
            previous=_folder(arguments["previous"], is_local),
            engine_weights=_folder(arguments["engine_weights"], is_local),
        )
        request = replace(request, trainer=_trainer(arguments["trainer"], request, is_local))
        return compare_rollouts(read, request, progress=arguments["progress"])


def _plan(folder: str | None, arguments: Mapping[str, Any]) -> "Plan":
    from harness.plan import plan_engine

    options = arguments["engine_options"] or {}
    engine = "hf" if arguments["engine"] is None else arguments["engine"]
    chosen = choose(engine, dtype=arguments["dtype"], device=arguments["device"], options=options, names=None)
    chosen = replace(chosen, checkpoint=folder, options=engine_option_texts(options))
    return chosen.opened(plan_engine(**chosen.changes(), local_files_only=arguments["local_files_only"]))


def _trainer(trainer: Any, request: "Request", is_local: bool) -> Any:
    """Return the trainer's module, which is loaded if a checkpoint was named."""
    import torch

    from harness.oracle.model import load_model

    if trainer is None or isinstance(trainer, torch.nn.Module):
        return trainer
    if not isinstance(trainer, str | Path):
        what, expected = "this is no trainer", "an nn.Module, or a checkpoint's name or folder"
        raise HarnessError(Code.BAD_OPTION, what, where="--trainer", expected=expected, actual=type(trainer).__name__)
    folder, dtype = _folder(trainer, is_local), getattr(torch, request.dtype)
    assert folder is not None
    return load_model(folder, dtype=dtype, device=request.device, stays=True).model


def _folder(name: str | Path | None, local_files_only: bool) -> Path | None:
    from harness.formats.checkpoint import resolve

    return None if name is None else Path(resolve(str(name), local_files_only=local_files_only))


def _check_choice(where: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        expected = ", ".join(choice for choice in choices if choice is not None)
        what = f"unknown value {value!r}"
        raise HarnessError(Code.BAD_OPTION, what, where=where, expected=expected, actual=value)
