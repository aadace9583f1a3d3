"""A HuggingFace model before its graph is known: its modules, its weights, and the errors of its own code.

What traces the graph is given this. The weights of each part are there while the part runs, or all of them where memory
is free.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.base.memory import available_bytes
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.formats.checkpoint.quantised import QuantisedSource, read_quantised_source
from harness.oracle.mtp import MtpLayers
from harness.oracle.weights import ResidentWeights, StreamedWeights

_TORCH = Path(torch.__file__).parent.as_posix()
_PASSED_THROUGH = ("harness/oracle/watch.py", "harness/oracle/precision.py", "harness/oracle/flow.py", f"{_TORCH}/")
"""Files whose frames stand between HF's code and the operation that raises."""


@contextmanager
def hf_failures(folder: Path) -> Iterator[None]:
    """Turn what HF's code raises in this block into an error that blames it; other exceptions pass.

    Raises:
        HarnessError: HF_FAILED.
    """
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        if not _is_hfs(error):
            raise
        message = " ".join(str(error).split())[:300]
        raise HarnessError(
            Code.HF_FAILED,
            f"HF's own forward raised {type(error).__name__}: {message}",
            where=folder,
            expected="a model that transformers can run",
            hint="run the model with transformers alone; try another --dtype, or another release of transformers",
        ) from error


def _is_hfs(error: Exception) -> bool:
    files = [Path(frame.filename).as_posix() for frame in traceback.extract_tb(error.__traceback__)]
    deciding = [file for file in files if not any(part in file for part in _PASSED_THROUGH)]
    return bool(deciding) and "/transformers" in deciding[-1]


@dataclass(eq=False, kw_only=True)
class UntracedModel:
    """A causal language model of transformers, without the graph of its operations."""

    model: Any
    """The `PreTrainedModel` in eval mode; its parameters may be on the meta device while they are not used."""
    checkpoint: Checkpoint
    dtype: torch.dtype
    """Of the engine, and so of the weights."""
    device: torch.device
    weights: ResidentWeights | StreamedWeights = field(default_factory=ResidentWeights)
    has_images: bool = False
    """Whether requests have images: then what the first decoder layer is given is an operation of its own."""
    mtp: MtpLayers | None = None
    """The layers that predict further tokens, if they are run, too."""
    lora_hash: str | None = None
    """Digest of the LoRA adapter that was put into the model; None without one."""
    lora_base: str | None = None
    """Model that the adapter's config says it was made for."""

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        return self.checkpoint.folder

    @cached_property
    def quantised_source(self) -> QuantisedSource | None:
        """The quantised checkpoint that the weights come from; None of any other model."""
        return read_quantised_source(self.folder)

    @cached_property
    def decoder_path(self) -> str | None:
        """Path of the text decoder in a model that reads images, too; None of a model of text alone."""
        if self.model.config.get_text_config() is self.model.config:
            return None
        decoder = self.model.get_decoder()
        return next((path for path, module in self.model.named_modules() if module is decoder), None)

    @property
    def config(self) -> Any:
        """HF's configuration of the (text) model."""
        return self.model.config.get_text_config()

    @property
    def configs(self) -> tuple[Any, ...]:
        """All configurations that its modules read."""
        return (self.config,) if self.mtp is None else (self.config, self.mtp.model.config)

    def tokens_ahead(self, path: str) -> int:
        """Return how many tokens after its own a row of what stands at a path is computed from."""
        return 0 if self.mtp is None else self.mtp.tokens_ahead(path)

    def followed_by(self, following: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
        """Give the layers that predict further tokens the tokens that follow those of the forwards in the block."""
        return nullcontext() if self.mtp is None else self.mtp.followed_by(following)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        """Number of positions the model was made for, by its rotary scaling too; None if its config sets no limit."""
        for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "context_length"):
            limit = getattr(self.config, name, None)
            if isinstance(limit, int) and limit > 0:  # -1 says that there is none
                return max(limit, stretched_positions(getattr(self.config, "rope_parameters", None), limit))
        return None

    def config_of(self, layer: int | None) -> Any:
        """Return HF's configuration of a layer; some settings of Gemma 4 differ from layer to layer."""
        is_by_layer = getattr(self.config, "is_heterogeneous", False)
        return self.config.per_layer_config[layer or 0] if is_by_layer else self.config

    def head_dim_of(self, layer: int | None) -> int:
        """Return the size of one attention head of a layer; of a model without attention, that of its rows."""
        config = self.config_of(layer)
        size = getattr(config, "head_dim", None)
        return int(size or config.hidden_size // getattr(config, "num_attention_heads", 1))

    @property
    def head_dim(self) -> int:
        """Size of one attention head of the first layer."""
        return self.head_dim_of(None)

    def run(self, **inputs: Any) -> Any:
        """Return what HF's forward returns.

        Raises:
            HarnessError: HF_FAILED: HF's own code raised.
        """
        _forget_lengths(self.model)
        with hf_failures(self.folder):
            return self.model(**inputs)

    def module(self, path: str) -> nn.Module:
        """Return the module at a path; raises AttributeError if there is none."""
        return self.model.get_submodule(path)  # type: ignore[no-any-return]

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Paths of the parts that run one after the other: embeddings, each decoder layer, final norm, head."""
        return tuple(_parts(self.model, ""))

    def part_of(self, path: str) -> str:
        """Return the part that holds the module at a path; the path itself where it stands outside of all."""
        return next((part for part in self.parts if path == part or path.startswith(f"{part}.")), path)

    def eager_attention(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return HF's eager attention of the file that defines an attention module, or what that is derived from.

        None if there is none.
        """
        files = (sys.modules[item.__module__] for item in type(module).__mro__)
        return next((file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward")), None)


def _parts(module: nn.Module, path: str) -> Iterator[str]:
    """Go through modules that hold a list of modules; everything else is one part."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield from (f"{child_path}.{index}" for index in range(len(child)))
        elif any(isinstance(part, nn.ModuleList) and len(part) for part in child.modules()):
            yield from _parts(child, child_path)
        else:
            yield child_path


def stretched_positions(rope: object, limit: int) -> int:
    """Return the positions that rotary scaling stretches a context to; 0 where it does not.

    Args:
        rope: the config's `rope_parameters`. Configs of Qwen with yarn name the original context as
            `max_position_embeddings` too, and vLLM multiplies it likewise. Those of `longrope` may have no factor.
        limit: the config's `max_position_embeddings`.
    """
    if not isinstance(rope, Mapping) or rope.get("rope_type") not in (
        "linear",
        "yarn",
        "llama3",
        "dynamic",
        "longrope",
    ):
        return 0
    original = None if rope["rope_type"] == "dynamic" else rope.get("original_max_position_embeddings")
    return int(float(rope.get("factor") or 0) * (original or limit))


def frequencies_follow_length(config: Any) -> bool:
    """Tell whether rotary frequencies depend on the longest request of a forward."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = (
        parameters,
        *(parameter for parameter in parameters.values() if isinstance(parameter, dict)),
    )  # by type of layer
    return any(kind.get("rope_type") in ("longrope", "dynamic") for kind in kinds)


def _forget_lengths(model: nn.Module) -> None:
    """Restore the first frequencies: with scaling of type `dynamic`, HF keeps those of a long request for the next."""
    for module in model.modules():
        for name, original in module.named_buffers(recurse=False):
            kind, is_original, _ = name.partition("original_inv_freq")
            longest = f"{kind}max_seq_len_cached"
            if is_original and getattr(module, longest, 0) > getattr(module, "original_max_seq_len", 0):
                getattr(module, f"{kind}inv_freq").copy_(original)
                setattr(module, longest, module.original_max_seq_len)


@contextmanager
def all_parts_held(hf: UntracedModel) -> Iterator[None]:
    """Read the weights of each part when it begins to run and drop them when it ends; those that stay need no hooks."""
    with ExitStack() as stack:
        for path in () if isinstance(hf.weights, ResidentWeights) else hf.parts:
            running = ExitStack()
            module = hf.module(path)
            stack.enter_context(running)

            def before(_module: nn.Module, _args: Any, path: str = path, running: ExitStack = running) -> None:
                running.enter_context(hf.weights.held(path))

            def after(_module: nn.Module, _args: Any, _output: Any, running: ExitStack = running) -> None:
                running.close()

            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield


@contextmanager
def parts_kept(hf: UntracedModel) -> Iterator[None]:
    """Keep the weights of all parts in memory for a block, if they take at most half of the free memory.

    Otherwise each forward reads them again.
    """
    with ExitStack() as stack:
        for path in hf.parts if keeps_parts(hf) else ():
            stack.enter_context(hf.weights.held(path))
        yield


def keeps_parts(hf: UntracedModel) -> bool:
    """Whether `parts_kept` keeps the weights of a model."""
    num_bytes = sum(parameter.numel() * hf.dtype.itemsize for parameter in hf.model.parameters())
    return bool(2 * num_bytes <= _free_bytes(hf.device))


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()
