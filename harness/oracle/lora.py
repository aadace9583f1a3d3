"""A LoRA adapter (PEFT's format) in HF's model, exactly: what merging would give if it rounded nothing.

The linear modules that it changes are replaced by ones that add scaling * B (A x) to W x. In high precision that is the
merged weights' product; in the engine's dtype it is what an engine computes that does not merge.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from harness.base.files import read_text
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.oracle.model import HFModel, load_model

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_UNSERVED = ("use_dora", "fan_in_fan_out", "modules_to_save", "lora_bias", "trainable_token_indices")
"""Fields that make another product of the same tensors."""


class LoraLinear(nn.Linear):
    """A linear module with an adapter's product beside its own; it shares the weights of the one it replaces."""

    def __init__(self, base: nn.Linear, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Parameter(lora_a, requires_grad=False)
        self.lora_b = nn.Parameter(lora_b, requires_grad=False)
        self.scaling = scaling
        self.others: dict[str, Update] = {}
        """Updates of other adapters, which the engine serves as well, by their folders."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return W x + b + scaling * B (A x)."""
        update = functional.linear(functional.linear(input, self.lora_a), self.lora_b)
        return super().forward(input) + update * self.scaling


def load_adapted(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    lora: Path | None = None,
    others: Sequence[Path] = (),
) -> HFModel:
    """Load the HF model of a checkpoint, with an adapter where one is given.

    Args:
        checkpoint: its weights.
        dtype: of the model.
        device: where it is.
        lora: the adapter's folder.
        others: adapters that are not applied: rows that were given one of them have that for their cause.

    Raises:
        HarnessError: as `load_model`, and BAD_LORA as `add_adapter`.
    """
    hf = load_model(checkpoint, dtype=dtype, device=device, stays=lora is not None)
    if lora is not None:
        add_adapter(hf, lora)
        for other in others:
            _know_adapter(hf, other)
    return hf


def _know_adapter(hf: HFModel, folder: Path) -> None:
    """Keep what another adapter would add, at the modules that have one."""
    modules = dict(hf.model.named_modules())
    for path, update in read_adapter(folder).items():
        module = modules.get(path)
        if isinstance(module, LoraLinear):
            _check_shapes(update.a, update.b, module, path)
            module.others[str(folder)] = update


def add_adapter(hf: HFModel, folder: Path) -> None:
    """Put an adapter into a model whose weights are in memory (`load_model(..., stays=True)`).

    Raises:
        HarnessError: BAD_LORA: the folder holds no LoRA, or one whose names, shapes or ranks do not fit the model.
    """
    settings, tensors = _read_settings(folder), _read_tensors(folder)
    for path in _modules(tensors, folder):
        base = _linear(hf, path, folder)
        update = _update(settings, tensors, path)
        _check_shapes(update.a, update.b, base, path)
        _check_rank(update, path)
        parent, _, name = path.rpartition(".")
        a, b = update.a.to(hf.device, hf.dtype), update.b.to(hf.device, hf.dtype)
        setattr(hf.module(parent), name, LoraLinear(base, a, b, update.scaling).eval())
    files = [(folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    hf.lora_hash = hashlib.sha256(b"".join(files)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The update that an adapter adds to one module: scaling * B (A x)."""

    a: torch.Tensor
    """[rank, inputs]"""
    b: torch.Tensor
    """[outputs, rank]"""
    scaling: float
    rank: int
    """As the config states it."""


def read_adapter(folder: Path) -> dict[str, Update]:
    """Read an adapter in PEFT's format, by the paths of the modules that it changes.

    Raises:
        HarnessError: BAD_LORA.
    """
    settings, tensors = _read_settings(folder), _read_tensors(folder)
    return {path: _update(settings, tensors, path) for path in _modules(tensors, folder)}


def _modules(tensors: Mapping[str, torch.Tensor], folder: Path) -> list[str]:
    modules = sorted({key.removesuffix(_A).removesuffix(_B) for key in tensors})
    if not modules:
        raise _bad("the adapter has no weights", where=folder / WEIGHTS_FILE)
    return modules


def _update(settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], path: str) -> Update:
    a, b = tensors.get(path + _A), tensors.get(path + _B)
    if a is None or b is None:
        raise _bad("the adapter has one of two tensors", where=path, expected=path + (_A if a is None else _B))
    rank = _own(settings, "rank_pattern", path, settings["r"])
    return Update(a=a, b=b, scaling=_scaling(settings, path, len(a)), rank=rank)


def _check_rank(update: Update, path: str) -> None:
    if len(update.a) != update.rank:
        what = "the adapter's rank is not the one that its config states"
        raise _bad(what, where=path, expected=update.rank, actual=len(update.a))


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        settings = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise _bad(f"the adapter's config cannot be read: {error}", where=path) from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        actual = settings.get("peft_type") if isinstance(settings, dict) else None
        raise _bad("the adapter is no LoRA", where=path, expected="peft_type LORA", actual=actual)
    unserved = [name for name in _UNSERVED if settings.get(name)]
    if unserved or settings.get("bias", "none") != "none":
        raise _bad("the adapter is a variant that is not served", where=path, actual=", ".join(unserved) or "bias")
    for name in ("r", "lora_alpha"):
        if not _is_positive(settings.get(name)):
            raise _bad(f"{name} is impossible", where=path, expected="a number above 0", actual=settings.get(name))
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = settings.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
            raise _bad(f"{name} is impossible", where=path, expected="numbers above 0 by module", actual=pattern)
    return settings


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS_FILE
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise _bad(f"the adapter's weights cannot be read: {error}", where=path) from error
    others = [key for key in tensors if not key.startswith(_PREFIX) or not key.endswith((_A, _B))]
    if others:
        what = "the adapter has a tensor that is no part of a LoRA"
        raise _bad(what, where=path, expected=f"{_PREFIX}MODULE{_A} and {_B}", actual=others[0])
    return {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items()}


def _linear(hf: HFModel, path: str, folder: Path) -> nn.Linear:
    module = dict(hf.model.named_modules()).get(path)
    if not isinstance(module, nn.Linear):
        what = "the adapter changes a module that is no linear one of the model"
        raise _bad(what, where=folder / WEIGHTS_FILE, expected="a linear module", actual=path)
    return module


def _check_shapes(a: torch.Tensor, b: torch.Tensor, base: nn.Linear, path: str) -> None:
    fits = a.dim() == b.dim() == 2 and (a.shape[1], b.shape[0]) == (base.in_features, base.out_features)
    if not fits or a.shape[0] != b.shape[1]:
        raise _bad(
            "the adapter's tensors do not fit the module",
            where=path,
            expected=f"A [rank, {base.in_features}], B [{base.out_features}, rank]",
            actual=f"A {list(a.shape)}, B {list(b.shape)}",
        )


def _scaling(settings: Mapping[str, Any], path: str, rank: int) -> float:
    """Return alpha / r; alpha / sqrt(r) for rank-stabilised LoRA."""
    alpha = float(_own(settings, "alpha_pattern", path, settings["lora_alpha"]))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _own(settings: Mapping[str, Any], pattern: str, path: str, default: Any) -> Any:
    """Return what a pattern says of a module: its keys are ends of paths."""
    patterns = settings.get(pattern) or {}
    return next((value for key, value in patterns.items() if path == key or path.endswith(f".{key}")), default)


def _bad(what: str, *, where: object, expected: object = None, actual: object = None) -> HarnessError:
    hint = "give the folder that PEFT's save_pretrained wrote, for this base model"
    return HarnessError(Code.BAD_LORA, what, where=where, expected=expected, actual=actual, hint=hint)
