"""Arguments of the functions: prompts, models and dtypes as Python has them, and errors that speak of arguments."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Union

from harness.base.scratch import scratch_folder
from harness.errors import Code, HarnessError
from harness.formats.case import RequestSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

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
    """Return prompts as requests; none for None.

    Args:
        prompts: a text, or several texts, lists of token ids (tensors, too), lists of chat messages, or what HF's
            processor returns for one request (`input_ids`, `pixel_values`, ...).

    Raises:
        HarnessError: EMPTY_PROMPT, or BAD_OPTION for what is none of these.
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
    """Yield a checkpoint as `plan_request` takes it, and what to call it if that is something else.

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
        if is_sharded(model):  # of several ranks the first alone saves, and all read that
            distributed.broadcast_object_list(path)
        yield path[0], model.name_or_path or type(model).__name__
        if is_sharded(model):
            distributed.barrier()


def _save(model: "PreTrainedModel", folder: Path) -> None:
    """Save a model's weights and config, and the tokenizer that it came with, if there is one."""
    from transformers import AutoTokenizer

    from harness.base.quiet import quiet_transformers
    from harness.engines.module import check_has_values

    check_has_values(model)
    config = dict(vars(model.config))
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.save_pretrained(folder)
        except Exception as error:  # whatever its weights are made of
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
