"""Arguments of the functions: what is checked, prompts, models and dtypes as Python has them, and their errors."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Union

from harness.base.files import scratch_folder
from harness.engines import Engine, engine_names
from harness.errors import Code, HarnessError
from harness.formats.case import RequestSpec

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from harness.plan import Plan

    Subject = str | Engine | nn.Module


Model = Union[str, Path, "PreTrainedModel"]
Dtype = Union[str, "torch.dtype"]
Prompts = str | Sequence[str | Sequence[int] | Sequence[Mapping[str, Any]]]

_OPTION = re.compile(r"--(?P<name>[a-z]+(?:-[a-z]+)*)(?: (?P<value>[\w.,:\"]+))?")
_ARGUMENTS = {
    "prompt": "prompts",
    "token-ids": "prompts",
    "schedule": "schedules",
    "engine-option": "engine_options",
    "phase": "phases",
}


@contextmanager
def named_as_arguments() -> Iterator[None]:
    """Let errors of the block name arguments where they name options of the command line."""
    try:
        yield
    except HarnessError as error:
        error.where, error.hint = _with_arguments(error.where), _with_arguments(error.hint)
        error.args = (str(error),)
        raise


def _with_arguments(text: Any) -> Any:
    if not isinstance(text, str) or text.startswith("harness "):  # a command to run
        return text
    return _OPTION.sub(_argument, text)


def _argument(option: re.Match[str]) -> str:
    name, value = option["name"], (option["value"] or "").strip('"')
    argument = _ARGUMENTS.get(name, name.replace("-", "_"))
    if not value:
        return f"{argument}="
    if name == "token-ids":
        return f"{argument}=[[{value.replace(',', ', ')}]]"
    return f'{argument}=["{value}"]' if argument in ("prompts", "schedules", "phases") else f'{argument}="{value}"'


def requests_of(prompts: Prompts | None) -> list[RequestSpec]:
    """Return prompts as requests; an empty result for None.

    Args:
        prompts: a text, or several texts, lists of token ids (tensors, too), lists of chat messages, or what HF's
            processor returns for one request (`input_ids`, `pixel_values`, ...).

    Raises:
        HarnessError: EMPTY_PROMPT, or BAD_OPTION for anything else.
    """
    if prompts is None:
        return []
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence):
        _refuse_prompt("prompts=", prompts)
    if len(prompts) == 0:
        hint = 'prompts=["some text"], or prompts=[[1, 2, 3]]'
        raise HarnessError(Code.EMPTY_PROMPT, "there is no prompt", where="prompts=", actual="[]", hint=hint)
    return [_request(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]


def _request(where: str, prompt: Any) -> RequestSpec:
    if isinstance(prompt, str):
        if not prompt.strip():
            hint = "give some text"
            raise HarnessError(Code.EMPTY_PROMPT, "the prompt is empty", where=where, actual=repr(prompt), hint=hint)
        return RequestSpec(prompt=prompt)
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        return _processed(where, prompt)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
        return RequestSpec(messages=[dict(message) for message in prompt])
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, Sequence) or not all(type(token) is int for token in ids):
        _refuse_prompt(where, prompt)
    if not ids:
        hint = "give at least one token"
        raise HarnessError(Code.EMPTY_PROMPT, "the prompt has no token", where=where, actual="[]", hint=hint)
    return RequestSpec(token_ids=list(ids))


def _processed(where: str, prompt: Mapping[str, Any]) -> RequestSpec:
    """Return the request that HF's processor has made tensors of."""
    from safetensors.torch import save

    from harness.oracle.images import keep_bytes

    ids, others = prompt["input_ids"], {**prompt}
    if getattr(ids, "ndim", 0) != 2 or len(ids) != 1:
        _refuse_prompt(f"{where}: input_ids", getattr(ids, "shape", ids))
    others = {name: x.contiguous() for name, x in others.items() if name not in ("input_ids", "attention_mask")}
    return RequestSpec(token_ids=ids[0].tolist(), inputs=keep_bytes(save(others)) if others else None)


def _refuse_prompt(where: str, actual: object) -> NoReturn:
    raise HarnessError(
        Code.BAD_OPTION,
        "a prompt is neither text nor a list of token ids or of chat messages",
        where=where,
        expected='prompts=["some text"], prompts=[[1, 2, 3]], or prompts=[[{"role": "user", "content": "Hi"}]]',
        actual=repr(actual)[:80],
    )


def dtype_name(dtype: Dtype) -> str:
    """Return a dtype's name: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def engine_option_texts(options: Any) -> dict[str, str]:
    """Return an engine's options as texts: `true` for True, `16` for 16."""
    return {str(name): str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


@contextmanager
def checkpoint(model: Model | None) -> Iterator[tuple[str | None, str | None]]:
    """Yield a checkpoint as `plan_request` takes it, and its name if that differs.

    The weights of a model object are saved to a folder that is there for the duration of the block.

    Raises:
        HarnessError: BAD_OPTION: the model is no checkpoint; ENGINE_CANNOT_SERVE: its weights have no values.
    """
    if model is None or isinstance(model, str | Path):
        yield None if model is None else str(model), None
        return
    from torch import distributed
    from transformers import PreTrainedModel

    from harness.judge.weights.sources import is_sharded, merged, unsharded

    model = merged(model, where="model=")
    if not isinstance(model, PreTrainedModel):
        raise HarnessError(
            Code.BAD_OPTION,
            "this is no model of HF's, which could say what is right",
            where="model=",
            expected="a folder, the name of an embedded checkpoint, a hub id, or a PreTrainedModel",
            actual=type(model).__name__,
            hint='model="path/to/checkpoint", the one that your weights come from',
        )
    with scratch_folder("harness-") as folder:
        _save(unsharded(model), folder / "model")
        path = [str(folder / "model")]
        if is_sharded(model):  # only the first rank saves, and all ranks read that
            distributed.broadcast_object_list(path)
        yield path[0], model.name_or_path or type(model).__name__
        if is_sharded(model):
            distributed.barrier()


def _save(model: "PreTrainedModel", folder: Path) -> None:
    """Save a model's weights and config, and the tokenizer that it came with, if there is one."""
    from transformers import AutoTokenizer

    from harness.base.progress import quiet_transformers
    from harness.engines.module import check_has_values

    check_has_values(model)
    config = dict(vars(model.config))
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.save_pretrained(folder)
        except Exception as error:  # with any kind of weights
            raise HarnessError(
                Code.BAD_OPTION,
                f"the weights of the model cannot be saved: {error}",
                where=f"model= {type(model).__name__}",
                hint='model="path/to/checkpoint"',
            ) from error
        finally:
            vars(model.config).update(config)
        with suppress(Exception):  # prompts may be token ids
            tokenizer = AutoTokenizer.from_pretrained(
                model.name_or_path, local_files_only=True, trust_remote_code=False
            )
            tokenizer.save_pretrained(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The engine under test, with its dtype and device."""

    name: str
    dtype: str | None
    """None for the checkpoint's own."""
    device: str | None
    open: Callable[[Path, str, str], Engine] | None = None
    """Returns the engine for a checkpoint, a dtype and a device; None for one that is opened by its name."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of an engine that is opened by its name."""
    checkpoint: str | None = None
    """The checkpoint that gives the truth; None for the embedded default."""
    label: str | None = None
    """Name of the checkpoint in reports if that is not its path."""

    def changes(self) -> dict[str, Any]:
        """Return the fields that replace those of the plan's case."""
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
    """Return what the first argument of `check` is.

    Raises:
        HarnessError: BAD_OPTION: it is nothing that can be checked, or an argument does not go with it; UNKNOWN_ENGINE
            for None.
    """
    from torch import nn

    wanted, place = dtype_name(dtype), None if device is None else str(device)
    is_module = isinstance(engine, nn.Module)
    is_stepper = callable(getattr(engine, "step", None)) and not isinstance(engine, type)
    if names is not None and not is_module and not is_stepper:
        _refuse_argument("names=", names, "names are for an nn.Module, or an object with a method `step`")
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
    if is_stepper:
        return _chosen_stepper(engine, wanted, place, names)
    raise _no_engine(engine)


def model_or_own(engine: Any, model: "Model | None") -> "Model | None":
    """Return the model that gives the truth: for a model object of HF's by default its own weights.

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


def _chosen_stepper(engine: Any, dtype: str, device: str | None, names: Mapping[str, str] | None) -> Chosen:
    """Return an engine that has steps alone: its dtype is that of its modules."""
    from harness.engines.by_content import StepEngine, module_paths
    from harness.engines.module import module_dtype

    dtypes = (module_dtype(module, dtype, may_cast=True) for module in module_paths(engine))  # learning refuses others
    name = type(engine).__name__
    return Chosen(
        name=name,
        dtype=next((known for known in dtypes if known is not None), None if dtype == "auto" else dtype),
        device=device,
        open=lambda folder, dtype, _device: StepEngine(
            lambda: engine, name=name, folder=folder, dtype=dtype, tap_names=names
        ),
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
