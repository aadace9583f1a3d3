"""Compare the tensors of a checkpoint with those that its config asks for.

HF's own module, built on the meta device, which takes no memory, says which tensors those are: every architecture that
transformers knows is covered without a table of names here. To import transformers and to build the module takes
seconds, so the names and shapes are kept in the harness's cache, by the content of the config and the versions of
transformers and torch.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.base.files import json_digest, read_bytes, write_text
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import CONFIG_NAME, cache_dir
from harness.formats.safetensors_header import TensorEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_LAYERS = 4096
"""Layers of the deepest model that is built on the meta device; more is a mistake in the config."""
_CACHE_VERSION = 1
"""Part of the key of what is kept: raise it with every change of `_expected_tensors`."""


def against_config(folder: Path, config: Mapping[str, Any], actual: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Compare the tensors of a checkpoint with those that its config asks for.

    Raises:
        HarnessError: UNSUPPORTED_ARCHITECTURE, BAD_CONFIG.
    """
    if "quantization_config" in config:
        return {"compared": False, "reason": "the tensors are packed as quantization_config says"}
    asked_for = _cached_expected_tensors(folder, config)
    if "reason" in asked_for:
        return {"compared": False, "reason": asked_for["reason"]}
    expected, tied = asked_for["shapes"], asked_for["tied"]
    misshapen = [
        {"name": name, "expected": expected[name], "actual": list(entry.shape)}
        for name, entry in sorted(actual.items())
        if name in expected and list(entry.shape) != expected[name]
    ]
    return {
        "compared": True,
        "missing": sorted(name for name in expected.keys() - actual.keys() if tied.get(name) not in actual),
        "unexpected": sorted(actual.keys() - expected.keys()),
        "misshapen": misshapen,
        "tied": sorted(tied),
    }


def _cached_expected_tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `_expected_tensors` returns, from the cache where it is known.

    A process that had imported transformers before may have patched it, so it only reads the cache.
    """
    file = _cache_file(config)
    if file is not None and (known := _read_cached(file)) is not None:
        return known
    may_be_patched = _transformers_is_imported()
    asked_for = _expected_tensors(meta_model(folder, config))
    if file is not None and not may_be_patched:
        with suppress(HarnessError):  # a cache that cannot be written costs time, not correctness
            write_text(file, json.dumps({"digest": json_digest(asked_for), "tensors": asked_for}))
    return asked_for


def _cache_file(config: Mapping[str, Any]) -> Path | None:
    """Return where the expected tensors of a config are kept; None where no key tells two answers apart.

    A package built from a repository changes while its version stays; a config may name other files of configs.
    """
    try:
        versions = [version(package) for package in ("transformers", "torch")]
    except PackageNotFoundError:
        return None
    if any("dev" in item for item in versions) or "configuration_files" in config:
        return None
    return cache_dir() / "expected-tensors" / f"{json_digest([_CACHE_VERSION, versions, dict(config)])}.json"


def _read_cached(file: Path) -> dict[str, Any] | None:
    """Return what a file of the cache holds; None if it is absent or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(read_bytes(file))
        asked_for: dict[str, Any] = kept["tensors"]
        is_whole = "reason" in asked_for or {"shapes", "tied"} <= asked_for.keys()
        if is_whole and kept["digest"] == json_digest(asked_for):
            return asked_for
    return None


def _transformers_is_imported() -> bool:
    return "transformers" in sys.modules


def _expected_tensors(model: "PreTrainedModel") -> dict[str, Any]:
    """Return `shapes` of a model's tensors and its `tied` names, or the `reason` not to compare them."""
    if is_converted(model):
        return {"reason": "transformers renames or merges this model's tensors as it loads them"}
    return {
        "shapes": {name: list(tensor.shape) for name, tensor in model.state_dict().items()},
        "tied": tied_tensors(model),
    }


def meta_model(folder: Path, config: Mapping[str, Any]) -> "PreTrainedModel":
    """Build the model that the config describes, without memory for its tensors."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    where = folder / CONFIG_NAME
    kind, num_layers = config.get("model_type"), config.get("num_hidden_layers")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        what = "transformers does not know this model_type"
        _refuse(Code.UNSUPPORTED_ARCHITECTURE, what, where, kind, hint="upgrade transformers, or correct config.json")
    auto = auto_class(kind)
    if auto is None:
        what = "transformers has no causal language model of this model_type"
        _refuse(Code.UNSUPPORTED_ARCHITECTURE, what, where, kind, hint="inspect its safetensors files one by one")
    if isinstance(num_layers, int) and num_layers > MAX_LAYERS:
        what = f"num_hidden_layers exceeds {MAX_LAYERS}"
        _refuse(Code.BAD_CONFIG, what, where, num_layers, hint="correct config.json")
    try:
        with torch.device("meta"):
            settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            return auto.from_config(settings, trust_remote_code=False)
    except Exception as error:  # any value of the config may be the one that transformers fails on
        what = "transformers cannot build the model that the config describes"
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        _refuse(Code.BAD_CONFIG, what, where, reason, hint="correct config.json, or download the checkpoint again")


def auto_class(kind: str) -> Any:
    """Return transformers' class that loads a model_type as a decoder, with what reads images before it, if need be.

    None for an encoder, and for what is no language model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    config = CONFIG_MAPPING[kind]
    if config in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    is_decoder = config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder
    return AutoModelForImageTextToText if is_decoder else None


def is_converted(model: "PreTrainedModel") -> bool:
    """Return whether transformers loads this model from tensors of other names than its modules have."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def tied_tensors(model: "PreTrainedModel") -> dict[str, str]:
    """Return the tensors that are another one under a second name, with that name."""
    return dict(model.all_tied_weights_keys) if getattr(model.config, "tie_word_embeddings", False) else {}


def _refuse(code: Code, what: str, where: object, actual: object = None, *, hint: str) -> NoReturn:
    raise HarnessError(code, what, where=where, actual=actual, hint=hint)
