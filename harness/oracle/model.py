"""A HuggingFace model as the oracle uses it: its modules, its weights, and the graph of its operations.

A transformers that was patched is refused: a patched oracle judges itself.
"""

import ast
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from harness.base.progress import quiet_transformers
from harness.errors import Code, HarnessError, some_of
from harness.formats.checkpoint import CONFIG_NAME, Checkpoint
from harness.formats.checkpoint.against_config import against_config, auto_class
from harness.formats.taps import Graph
from harness.oracle.mtp import MtpLayers
from harness.oracle.precision import PreservePrecision, eager_experts, upcast_parameters, without_tf32
from harness.oracle.untraced import UntracedModel
from harness.oracle.weights import StreamedWeights, parameters_on_meta

_RESIDENT_BYTES = 512 << 20
"""Checkpoints up to this size are loaded whole; of larger ones one layer is in memory at a time."""


class HFModel(UntracedModel):
    """A causal language model of transformers, and the graph of its operations."""

    @cached_property
    def graph(self) -> Graph:
        """Operations of the model in the order of its run, traced from a forward over a few tokens."""
        from harness.oracle.graph import trace_graph

        return trace_graph(self)

    @contextmanager
    def exactly(self, path: str | None = None, *, dtype: torch.dtype = torch.float64) -> Iterator[None]:
        """Run modules in high precision for the duration of the block.

        Args:
            path: of the module to hold in `dtype`; None for modules that are held in it already.
            dtype: float64 or float32.
        """
        with ExitStack() as stack:
            stack.enter_context(without_tf32())
            stack.enter_context(eager_experts(*self.configs))
            if path is not None:
                stack.enter_context(self.weights.held(self.part_of(path)))
                stack.enter_context(upcast_parameters(dtype, self.module(path)))
            stack.enter_context(PreservePrecision(dtype))
            yield


def load_model(
    checkpoint: Checkpoint | str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    stays: bool = False,
    mtp: bool = False,
    may_be_patched: bool = False,
) -> HFModel:
    """Load the HF model of a checkpoint in `dtype`, with SDPA attention where it computes what the family does.

    Args:
        checkpoint: a checkpoint, or its folder.
        dtype: of the weights.
        device: where to run.
        stays: whether to load all weights at once, however large: for a model that is run more than a few times.
        mtp: whether to run the layers that predict further tokens, too. All weights are then loaded at once.
        may_be_patched: whether an engine may have changed transformers in this process: for a model that only helps to
            find an engine's tensors, and judges nothing.

    Raises:
        HarnessError: the architecture is unknown to transformers, which may not be patched (ORACLE_PATCHED), or the
            tensors do not fit the config; with `mtp` as `add_mtp_layers`.
    """
    checkpoint, where = Checkpoint.of(checkpoint), torch.device(device)
    try:
        hf = _loaded(checkpoint, dtype, where, stays=stays or mtp)
        if not may_be_patched:
            check_is_unpatched(hf.model)
    except HarnessError as error:
        name = _other_kind(checkpoint.config)
        if name is None or error.code not in (Code.UNSUPPORTED_ARCHITECTURE, Code.TENSORS_CONTRADICT_CONFIG):
            raise
        raise HarnessError(
            Code.UNSUPPORTED_ARCHITECTURE,
            f"the checkpoint is a {name}, a kind of model that is not served",
            where=f"{checkpoint.folder / CONFIG_NAME}: architectures",
            expected="a decoder that ends in logits of the next token, such as Qwen3ForCausalLM",
            actual=name,
            hint="compare recordings of two engines, which needs no checkpoint: harness diff EXPECTED ACTUAL",
        ) from error
    if mtp:
        add_mtp_layers(hf)
    return hf


def add_mtp_layers(hf: HFModel) -> None:
    """Let every forward of a model, whose weights are in memory, run the layers that predict further tokens.

    Raises:
        HarnessError: UNSUPPORTED_ARCHITECTURE: the checkpoint has none, or transformers does not run them.
    """
    try:
        hf.mtp = MtpLayers(hf.model, hf.device)
    except Exception as error:  # transformers raises ImportError, ValueError, KeyError, RuntimeError, ...
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HarnessError(
            Code.UNSUPPORTED_ARCHITECTURE,
            f"transformers runs no layers that predict further tokens (MTP) of this checkpoint: {what}",
            where=hf.folder,
            expected="a checkpoint with such layers, of a family whose configuration has num_mtp_layers",
            actual=type(hf.model).__name__,
            hint="check it without --mtp",
        ) from error


def _other_kind(config: Mapping[str, Any]) -> str | None:
    """Return transformers' class of an encoder, a reward model, a model of images, ...; None of a decoder's."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    named = config.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    served = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if set(names) & {name for item in served for name in item.values()}:
        return None
    return next((name for name in names if hasattr(transformers, name)), None)


def _loaded(checkpoint: Checkpoint, dtype: torch.dtype, where: torch.device, *, stays: bool) -> HFModel:
    _check_tensors(checkpoint)
    if stays or checkpoint.num_bytes <= _RESIDENT_BYTES:
        model = _from_pretrained(checkpoint.folder, dtype).to(where).eval().requires_grad_(False)
        _leave_sdpa_if_scores_are_capped(model)
        return HFModel(model=model, checkpoint=checkpoint, dtype=dtype, device=where)
    model = _skeleton(checkpoint.folder, dtype, where)
    _leave_sdpa_if_scores_are_capped(model)
    weights = StreamedWeights(model, checkpoint, dtype=dtype, device=where)
    return HFModel(model=model, checkpoint=checkpoint, dtype=dtype, device=where, weights=weights)


def _skeleton(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Build the model without its parameters."""
    try:
        with quiet_transformers(), warnings.catch_warnings(), parameters_on_meta():
            warnings.simplefilter("ignore")
            config, auto = _config_and_class(folder)
            model = _with_attention(auto.from_config, config, dtype=dtype)
    except Exception as error:
        raise _loading_error(folder, error) from error
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return model.eval()


def _config_and_class(folder: Path) -> tuple[Any, Any]:
    """Return HF's configuration of a checkpoint, and the class that loads it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config, auto_class(config.model_type) or AutoModelForCausalLM


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors are not those that its config asks for, before any of them is read."""
    folder, config = checkpoint.folder, checkpoint.config
    _refuse_other_weights(folder, config)
    _ = checkpoint.settings_hash  # of the files that are read now
    if config.get("quantization_config"):
        raise HarnessError(
            Code.UNSUPPORTED_ARCHITECTURE,
            "the checkpoint's weights are quantised",
            where=f"{folder / CONFIG_NAME}: quantization_config",
            expected="weights in float32, bfloat16 or float16",
            hint="pass the model it was quantised from",
        )
    against = against_config(folder, config, {name: entry for name, (entry, _) in checkpoint.tensors.items()})
    if not against["compared"]:
        return
    for kind in ("misshapen", "missing", "unexpected"):
        if against[kind]:
            raise _contradiction(folder, kind, against[kind])


def _refuse_other_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder of which transformers would load other weights than those that its hash is of."""
    adapter, is_named = folder / "adapter_config.json", bool(config.get("transformers_weights"))
    if is_named or adapter.exists():
        raise HarnessError(
            Code.NOT_A_CHECKPOINT,
            "transformers would load other weights than those of the folder",
            where=f"{folder / CONFIG_NAME}: transformers_weights" if is_named else adapter,
            expected="a folder with one model",
            hint="check the base with the adapter (--model BASE --lora FOLDER), or take the named file or field away",
        )


def _contradiction(folder: Path, kind: str, tensors: Sequence[Any]) -> HarnessError:
    names = [tensor["name"] if kind == "misshapen" else tensor for tensor in tensors]
    return HarnessError(
        Code.TENSORS_CONTRADICT_CONFIG,
        f"the checkpoint's tensors do not fit its config: {kind}: {some_of(names, 3)}",
        where=folder,
        expected=tensors[0]["expected"] if kind == "misshapen" else None,
        actual=tensors[0]["actual"] if kind == "misshapen" else None,
        hint=f"harness inspect {folder}",
    )


def _with_attention(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a model with SDPA, or with eager attention where the family has no other."""
    try:
        return build(*args, attn_implementation="sdpa", **kwargs)
    except ValueError as error:
        if "attn_implementation" not in str(error) and "scaled_dot_product_attention" not in str(error):
            raise
        return build(*args, attn_implementation="eager", **kwargs)


def _leave_sdpa_if_scores_are_capped(model: Any) -> None:
    """Set eager attention for a family that caps its scores (Gemma 2).

    SDPA has no cap: transformers 5.17 leaves it out without a word, later versions refuse.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        with quiet_transformers():
            model.set_attn_implementation("eager")


def _from_pretrained(folder: Path, dtype: torch.dtype) -> Any:
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, loading = _with_attention(
                _config_and_class(folder)[1].from_pretrained,
                folder,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
    except HarnessError:
        raise
    except Exception as error:  # transformers raises ValueError, KeyError, OSError, RuntimeError, SafetensorError...
        raise _loading_error(folder, error) from error
    faults = {kind: sorted(map(str, names)) for kind, names in loading.items() if names}
    if faults:
        details = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(names[:4])}" for kind, names in faults.items())
        raise HarnessError(
            Code.TENSORS_CONTRADICT_CONFIG,
            f"the checkpoint's tensors do not fit its config ({details})",
            where=folder,
            hint=f"harness inspect {folder}",
        )
    return model


def _loading_error(folder: Path, error: Exception) -> HarnessError:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lowered = text.lower()
    if "model type" in lowered or "unrecognized configuration" in lowered or "does not recognize" in lowered:
        code = Code.UNSUPPORTED_ARCHITECTURE
    elif "mismatch" in lowered:
        code = Code.TENSORS_CONTRADICT_CONFIG
    elif type(error).__name__ == "SafetensorError":
        code = Code.DAMAGED_SAFETENSORS
    else:
        code = Code.BAD_CONFIG
    return HarnessError(code, f"transformers cannot load it: {text}", where=folder, hint=f"harness inspect {folder}")


_HOLDERS = ("fget", "__func__", "func", "_torchdynamo_inline")
"""Where properties, class methods, cached properties and scripted functions keep the function they were made of."""
_LIBRARIES = tuple(package.__path__[0] for package in (torch, transformers))


def check_is_unpatched(model: nn.Module) -> None:
    """Refuse a model whose classes, or the functions beside them, were replaced after transformers was imported.

    Libraries of kernels replace them for the whole process (`apply_..._to_llama()`), and so for the oracle too. A
    module of one model may be replaced at will.

    Raises:
        HarnessError: ORACLE_PATCHED.
    """
    for name in sorted({type(module).__module__ for module in model.modules()}):
        if not name.startswith("transformers.models."):
            continue
        for path, replacement in _replaced(sys.modules[name]):
            raise HarnessError(
                Code.ORACLE_PATCHED,
                "transformers was patched in this process, so that it cannot say what is right",
                where=f"{name}.{path}",
                expected=f"what {name} defines",
                actual=f"{replacement.__module__}.{getattr(replacement, '__qualname__', '?')}",
                hint="patch the one model that is checked, model.model.layers[0].mlp = ..., not the library",
            )


def _replaced(file: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield functions, classes and methods of a file whose code is another package's."""
    for names in _defined(file.__name__):
        definition: Any = file
        for name in names:
            definition = inspect.getattr_static(definition, name, None)
        for wrapped in _HOLDERS:
            definition = getattr(definition, wrapped, None) or definition
        if not _is_of_the_library(definition):
            yield ".".join(names), definition


def _is_of_the_library(definition: Any) -> bool:
    """Whether a function or a class was written by transformers; decorators may be torch's."""
    code = getattr(definition, "__code__", None)
    if code is not None:  # a wrapper bears the name of what it wraps
        return str(code.co_filename).startswith(_LIBRARIES)
    return str(getattr(definition, "__module__", "transformers")).startswith("transformers.")


@cache
def _defined(file: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of functions and classes that a file's source defines, and of their methods."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[file]))
    except OSError:
        return ()  # without sources
    names = list[tuple[str, ...]]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append((node.name,))
        if isinstance(node, ast.ClassDef):
            names += [(node.name, item.name) for item in node.body if isinstance(item, ast.FunctionDef)]
    return tuple(names)
