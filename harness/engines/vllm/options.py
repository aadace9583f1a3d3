"""vLLM's own options: the fields of its `EngineArgs`, as `--engine-option NAME=VALUE` gives them."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm import EngineArgs

from harness.engines.adapter import refuse_unknown_options
from harness.errors import Code, HarnessError

_SAID_ELSEWHERE = {"model": "--model", "dtype": "--dtype", "tensor_parallel_size": "--schedule tensor-parallel:N"}


def parse_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `EngineArgs`; values are read as JSON where they are JSON, else as text.

    Raises:
        HarnessError: BAD_OPTION: no such field, or one that another option of the harness says.
    """
    for name in options:
        if name in _SAID_ELSEWHERE:
            what = f"the engine option {name!r} is said by another option"
            raise HarnessError(
                Code.BAD_OPTION, what, where="--engine-option", expected=_SAID_ELSEWHERE[name], actual=name
            )
    refuse_unknown_options("vllm", options, sorted(field.name for field in fields(EngineArgs)))
    return {name: _parse(value) for name, value in options.items()}


def _parse(value: str) -> Any:
    if value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[value]
    try:
        return json.loads(value)
    except ValueError:
        return value


def base_arguments(folder: Path, dtype: str) -> dict[str, Any]:
    """Return the `EngineArgs` of every run: no tokenizer, and a cache that is as small as the requests allow."""
    return {
        "model": str(folder),
        "dtype": dtype,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 28,
    }
