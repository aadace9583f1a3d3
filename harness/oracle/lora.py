"""A LoRA adapter (PEFT's format) in HF's model, exactly: what merging would give if it rounded nothing.

The linear modules that it changes are replaced by ones that add scaling * B (A x) to W x. In high precision that is the
merged weights' product; in the engine's dtype it is what an engine computes that does not merge.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from harness.errors import HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.oracle.lora_config import CONFIG_FILE, AdapterConfig, bad_lora, read_lora_config
from harness.oracle.model import HFModel, load_model

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


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
    mtp: bool = False,
) -> HFModel:
    """Load the HF model of a checkpoint, with an adapter where one is given.

    Args:
        checkpoint: its weights.
        dtype: of the model.
        device: where it is.
        lora: the adapter's folder.
        others: adapters that are not applied: rows that were given one of them have that for their cause.
        mtp: see `load_model`.

    Raises:
        HarnessError: as `load_model`, and BAD_LORA as `add_adapter`.
    """
    hf = load_model(checkpoint, dtype=dtype, device=device, stays=lora is not None, mtp=mtp)
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
    config = read_lora_config(folder)
    updates = _read_updates(config, folder)
    bases = {path: _linear(hf, path, folder) for path in updates}
    for path, update in updates.items():
        _check_shapes(update.a, update.b, bases[path], path)
    _check_targets(hf, config, updates, folder)
    for path, update in updates.items():
        parent, _, name = path.rpartition(".")
        a, b = update.a.to(hf.device, hf.dtype), update.b.to(hf.device, hf.dtype)
        setattr(hf.module(parent), name, LoraLinear(bases[path], a, b, update.scaling).eval())
    files = [(folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    hf.lora_hash = hashlib.sha256(b"".join(files)).hexdigest()


def adapter_notes(hf: HFModel) -> Iterator[str]:
    """Say it if a model's adapter changes nothing: no check sees whether an engine applies it."""
    adapted = [module for module in hf.model.modules() if isinstance(module, LoraLinear)]
    num_idle = sum(not (module.lora_a.any() and module.lora_b.any()) for module in adapted)
    if num_idle:
        yield (
            f"the adapter changes nothing at {num_idle} of its {len(adapted)} modules, where A or B is all zeros: "
            "whether the engine applies it there was not seen"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The update that an adapter adds to one module: scaling * B (A x)."""

    a: torch.Tensor
    """[rank, inputs]"""
    b: torch.Tensor
    """[outputs, rank]"""
    scaling: float


def read_adapter(folder: Path) -> dict[str, Update]:
    """Read an adapter in PEFT's format, by the paths of the modules that it changes.

    Raises:
        HarnessError: BAD_LORA.
    """
    return _read_updates(read_lora_config(folder), folder)


def _read_updates(config: AdapterConfig, folder: Path) -> dict[str, Update]:
    tensors = _read_tensors(folder)
    paths = sorted({key.removesuffix(_A).removesuffix(_B) for key in tensors})
    if not paths:
        raise bad_lora("the adapter has no weights", where=folder / WEIGHTS_FILE)
    return {path: _update(config, tensors, path) for path in paths}


def _update(config: AdapterConfig, tensors: Mapping[str, torch.Tensor], path: str) -> Update:
    a, b = tensors.get(path + _A), tensors.get(path + _B)
    if a is None or b is None:
        raise bad_lora("the adapter has one of two tensors", where=path, expected=path + (_A if a is None else _B))
    if not config.targets(path):
        raise _not_targeted(path)
    if a.shape[:1] != (config.rank(path),):
        what = "the adapter's rank is not the one that its config states"
        raise bad_lora(what, where=path, expected=config.rank(path), actual=list(a.shape)[:1])
    return Update(a=a, b=b, scaling=config.scaling(path))


def _check_targets(hf: HFModel, config: AdapterConfig, updates: Mapping[str, Update], folder: Path) -> None:
    """Refuse weights that are not there, and those of a head, which `all-linear` leaves out."""
    modules = dict(hf.model.named_modules())
    if config.targets_all_linear:
        head = hf.model.get_output_embeddings()
        modules = {
            path: module for path, module in modules.items() if isinstance(module, nn.Linear) and module is not head
        }
    targets = {path for path in modules if path and config.targets(path)}
    if missing := sorted(targets.difference(updates)):
        what = "the adapter's config targets a module that it has no weights for"
        raise bad_lora(what, where=folder / WEIGHTS_FILE, expected=missing[0] + _A)
    if others := sorted(set(updates).difference(targets)):
        raise _not_targeted(others[0])


def _not_targeted(path: str) -> HarnessError:
    return bad_lora("the adapter has weights of a module that its config does not target", where=path)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS_FILE
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise bad_lora(f"the adapter's weights cannot be read: {error}", where=path) from error
    others = [key for key in tensors if not key.startswith(_PREFIX) or not key.endswith((_A, _B))]
    if others:
        what = "the adapter has a tensor that is no part of a LoRA"
        raise bad_lora(what, where=path, expected=f"{_PREFIX}MODULE{_A} and {_B}", actual=others[0])
    return {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items()}


def _linear(hf: HFModel, path: str, folder: Path) -> nn.Linear:
    module = dict(hf.model.named_modules()).get(path)
    if not isinstance(module, nn.Linear):
        what = "the adapter changes a module that is no linear one of the model"
        raise bad_lora(what, where=folder / WEIGHTS_FILE, expected="a linear module", actual=path)
    return module


def _check_shapes(a: torch.Tensor, b: torch.Tensor, base: nn.Linear, path: str) -> None:
    fits = a.dim() == b.dim() == 2 and (a.shape[1], b.shape[0]) == (base.in_features, base.out_features)
    if not fits or a.shape[0] != b.shape[1]:
        raise bad_lora(
            "the adapter's tensors do not fit the module",
            where=path,
            expected=f"A [rank, {base.in_features}], B [{base.out_features}, rank]",
            actual=f"A {list(a.shape)}, B {list(b.shape)}",
        )
