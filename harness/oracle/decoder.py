"""An HF decoder as the oracle sees it: the model, the graph of its operations, and the module behind each of them."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.checkpoint import CONFIG_NAME, read_config
from harness.errors import Code, HarnessError
from harness.inspect import inspect_path
from harness.taps import DecoderGraph, decoder_graph

_LAYER_CHILDREN = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_ATTENTION_CHILDREN = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_CHILDREN = ("gate_proj", "up_proj", "down_proj", "act_fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A loaded HF causal language model of the shape that `taps.decoder_graph` describes."""

    model: Any
    """The `PreTrainedModel`, in the engine's dtype, in eval mode."""
    graph: DecoderGraph
    folder: Path
    dtype: torch.dtype
    device: torch.device

    @property
    def config(self) -> Any:
        """HF's configuration of the model."""
        return self.model.config

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.model.model.layers  # type: ignore[no-any-return]

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return int(self.model.model.embed_tokens.weight.shape[0])

    @property
    def max_positions(self) -> int:
        """Number of positions the model was made for."""
        return int(self.config.max_position_embeddings)

    def module(self, tap: str) -> nn.Module:
        """Return the module that produces `tap`; raises AttributeError for a tap that has no module."""
        return self.model.get_submodule(tap)  # type: ignore[no-any-return]

    def head_dim(self) -> int:
        """Return the size of one attention head."""
        return int(self.layers[0].self_attn.head_dim)  # type: ignore[union-attr, arg-type]

    def library_function(self, name: str) -> Callable[..., Any]:
        """Return a function of the HF modelling file this model is defined in, `apply_rotary_pos_emb` for one."""
        module = sys.modules[type(self.layers[0].self_attn).__module__]
        try:
            return getattr(module, name)  # type: ignore[no-any-return]
        except AttributeError:
            raise HarnessError(
                Code.UNSUPPORTED_ARCHITECTURE,
                f"{module.__name__} defines no {name}, which the replay needs",
                where=self.folder,
            ) from None


def load_decoder(folder: Path, *, dtype: torch.dtype, device: str = "cpu") -> Decoder:
    """Load the HF model of a checkpoint folder in `dtype`, with SDPA attention.

    Raises:
        HarnessError: the architecture is unknown to transformers, or is not a decoder of the known graph, or the
            tensors do not fit the config.
    """
    _check_tensors(folder)
    model = _from_pretrained(folder, dtype).to(device).eval().requires_grad_(False)
    _check_structure(model, folder)
    attention = model.model.layers[0].self_attn
    graph = decoder_graph(num_layers=len(model.model.layers), has_qk_norm=hasattr(attention, "q_norm"))
    return Decoder(model=model, graph=graph, folder=folder, dtype=dtype, device=torch.device(device))


def _check_tensors(folder: Path) -> None:
    """Refuse a checkpoint whose tensors are not those that its config asks for, before any of them is read."""
    if read_config(folder).get("quantization_config"):
        raise HarnessError(
            Code.UNSUPPORTED_ARCHITECTURE,
            "the checkpoint's weights are quantised",
            where=f"{folder / CONFIG_NAME}: quantization_config",
            expected="weights in float32, bfloat16 or float16",
            hint="pass the model it was quantised from",
        )
    against = inspect_path(folder)["against_config"]
    if not against["compared"]:
        return
    for kind in ("misshapen", "missing", "unexpected"):
        if against[kind]:
            raise _contradiction(folder, kind, against[kind])


def _contradiction(folder: Path, kind: str, tensors: Sequence[Any]) -> HarnessError:
    names = [tensor["name"] if kind == "misshapen" else tensor for tensor in tensors]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return HarnessError(
        Code.TENSORS_CONTRADICT_CONFIG,
        f"the checkpoint's tensors do not fit its config: {kind}: {', '.join(names[:3])}{more}",
        where=folder,
        expected=tensors[0]["expected"] if kind == "misshapen" else None,
        actual=tensors[0]["actual"] if kind == "misshapen" else None,
        hint=f"harness inspect {folder}",
    )


def _from_pretrained(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="sdpa",
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


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' loading reports and bars: what they say of a bad checkpoint we say ourselves."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _check_structure(model: Any, folder: Path) -> None:
    """Refuse a model whose modules are not those of the graph: its taps could not be named."""
    base = getattr(model, "model", None)
    missing = [name for name in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(base, name)]
    missing += [] if hasattr(model, "lm_head") else ["lm_head"]
    missing += [] if len(getattr(base, "layers", ())) else ["layers.0"]
    for index, layer in enumerate(getattr(base, "layers", ())):
        parts = [(layer, "", _LAYER_CHILDREN), (getattr(layer, "self_attn", None), "self_attn.", _ATTENTION_CHILDREN)]
        parts.append((getattr(layer, "mlp", None), "mlp.", _MLP_CHILDREN))
        missing += [
            f"layers.{index}.{at}{name}" for part, at, names in parts for name in names if not hasattr(part, name)
        ]
    if missing:
        raise HarnessError(
            Code.UNSUPPORTED_ARCHITECTURE,
            f"{type(model).__name__} is not a decoder of the known graph: it lacks {', '.join(missing[:6])}",
            where=folder,
            expected="pre-norm layers with self_attn.{q,k,v,o}_proj and mlp.{gate,up,down}_proj (Llama, Qwen2, Qwen3)",
            actual=type(model).__name__,
        )
