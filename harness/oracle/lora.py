"""A LoRA adapter (PEFT's format) in HF's model, exactly: what merging would give if it rounded nothing.

The linear modules that it changes are replaced by ones that add scaling * B (A x) to W x. In high precision that is the
merged weights' product; in the engine's dtype it is what an engine computes that does not merge.

Every field of `adapter_config.json` means what it means to PEFT 0.21 (`AdapterConfig`, `check_target_module_exists`,
`get_pattern_key`). A field that is not listed here is refused unless it is null: PEFT has many variants that make
another product of the same tensors, and later versions add more. tests/unit/lora_cases.py compares this reader, the
reference engine's and PEFT.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import safetensors
import safetensors.torch
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn
from torch.nn import functional

from harness.base.files import read_text
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.oracle.model import HFModel, load_model

CONFIG_FILE = "adapter_config.json"
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "merge_weights", "peft_version",
    "revision", "runtime_config",  # where it comes from, and how PEFT runs it
    "lora_dropout",  # of training
    "corda_config", "eva_config", "lora_ga_config", "loftq_config",  # of an initialisation, which is read itself
    "qalora_group_size",  # of use_qalora, which is refused
})  # fmt: skip
"""Fields that change nothing in a trained adapter's function, whatever they hold."""
_CHANGES_BASE = "save it with path_initial_model_for_weight_conversion: its initialisation changed the base weights"


def _compiles(pattern: str, template: str = "{}") -> str:
    """Return a pattern; raises ValueError if it is no regular expression where PEFT puts it."""
    try:
        re.compile(template.format(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


def _within(template: str) -> Callable[[str], str]:
    return lambda pattern: _compiles(pattern, template)


_MODULE_KEY = r"(.*\.)?({})$"
_LAYER_KEY = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."
_Rank = Annotated[int, Field(gt=0, lt=2**31)]
_Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Regex = Annotated[str, AfterValidator(_compiles)]
_ModuleKey = Annotated[str, AfterValidator(_within(_MODULE_KEY))]
_LayersKey = Annotated[str, AfterValidator(_within(_LAYER_KEY))]
_Off = Literal[False] | None
_T = TypeVar("_T")


class AdapterConfig(BaseModel):
    """The fields that are read, and the values that they may have."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    peft_type: Literal["LORA"]
    r: _Rank
    lora_alpha: _Alpha
    use_rslora: bool = False
    rank_pattern: dict[_ModuleKey, _Rank] | None = None
    alpha_pattern: dict[_ModuleKey, _Alpha] | None = None
    target_modules: _Regex | list[str]
    exclude_modules: _Regex | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: _LayersKey | list[_LayersKey] | None = None
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal", "eva", "mica"] = True
    """Only those that leave the base weights as they are."""
    task_type: Literal["CAUSAL_LM"] | None = None
    bias: Literal["none"] = "none"
    ensure_weight_tying: _Off = None
    fan_in_fan_out: _Off = None
    lora_bias: _Off = None
    use_dora: _Off = None
    use_qalora: _Off = None

    @model_validator(mode="after")
    def _check_layers(self) -> "AdapterConfig":
        chooses = self.layers_to_transform is not None
        if isinstance(self.target_modules, str) and (chooses or self.layers_pattern is not None):
            raise ValueError("layers_to_transform and layers_pattern need target_modules to be a list")
        if self.layers_pattern and not chooses:
            raise ValueError("layers_pattern needs layers_to_transform")
        return self

    @property
    def targets_all_linear(self) -> bool:
        """Whether every linear module but the head is changed."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

    def targets(self, path: str) -> bool:
        """Whether the adapter changes the module at `path`; with `all-linear` it changes each."""
        if self.exclude_modules and _names(self.exclude_modules, path):
            return False
        if self.targets_all_linear:
            return True
        if isinstance(self.target_modules, str) or path in self.target_modules:
            return _names(self.target_modules, path)
        return _names(self.target_modules, path) and self._is_in_chosen_layer(path)

    def rank(self, path: str) -> int:
        """Return the rank of the module at `path`."""
        return _by_pattern(self.rank_pattern, path, self.r)

    def scaling(self, path: str) -> float:
        """Return alpha / r of the module at `path`; alpha / sqrt(r) for rank-stabilised LoRA."""
        rank = self.rank(path)
        return _by_pattern(self.alpha_pattern, path, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def _is_in_chosen_layer(self, path: str) -> bool:
        chosen = self.layers_to_transform
        if chosen is None or chosen == []:
            return True
        patterns = self.layers_pattern or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        keys = [_LAYER_KEY.format(pattern) for pattern in patterns] or [_ANY_LAYER]
        match_of_path = next((match for key in keys if (match := re.match(key, path))), None)
        if match_of_path is None or match_of_path["idx"] is None:
            return False
        return int(match_of_path["idx"]) in (chosen if isinstance(chosen, list) else [chosen])


def _names(modules: str | list[str], path: str) -> bool:
    """Whether a regular expression fits a whole path, or one of a list is its end."""
    if isinstance(modules, str):
        return re.fullmatch(modules, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in modules)


def _by_pattern(patterns: Mapping[str, _T] | None, path: str, default: _T) -> _T:
    """Return what the first pattern that fits the end of a path says; after a dot, or the whole path."""
    fits = (value for key, value in (patterns or {}).items() if re.match(_MODULE_KEY.format(key), path))
    return next(fits, default)


def read_lora_config(folder: Path) -> AdapterConfig:
    """Read the config of the adapter in `folder`.

    Raises:
        HarnessError: BAD_LORA: it cannot be read, is no LoRA's, or has a field or a value that is not served.
    """
    path = folder / CONFIG_FILE
    try:
        fields = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise bad_lora(f"the adapter's config cannot be read: {error}", where=path) from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        actual = fields.get("peft_type") if isinstance(fields, dict) else None
        raise bad_lora("the adapter is no LoRA", where=path, expected="peft_type LORA", actual=actual)
    try:
        config = AdapterConfig(**{name: value for name, value in fields.items() if name not in _WITHOUT_EFFECT})
    except ValidationError as error:
        raise _refusal(error, path) from error
    for name, value in (config.model_extra or {}).items():
        if value is not None and value != []:
            what = f"the adapter's {name} is not served"
            raise bad_lora(what, where=path, expected="null", actual=_shown(value))
    return config


_WORDS = {"missing": "is missing", "literal_error": "is not served"}
"""What pydantic's types of errors say of a field; of all others, that its value is impossible."""


def _refusal(error: ValidationError, path: Path) -> HarnessError:
    first, *others = error.errors(include_url=False)
    if not first["loc"]:
        return bad_lora("the adapter's config contradicts itself", where=path, actual=first["msg"])
    field = first["loc"][0]
    same = [first, *(item for item in others if item["loc"][0] == field)]
    expected = " or ".join(item["msg"].removeprefix("Input should be ") for item in same)
    what = f"the adapter's {field} {_WORDS.get(first['type'], 'is impossible')}"
    actual = None if first["type"] == "missing" else _shown(first["input"])
    hint = _CHANGES_BASE if field == "init_lora_weights" else None
    return bad_lora(what, where=path, expected=expected, actual=actual, hint=hint)


def _shown(value: object) -> str:
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < 1 << 64
        else f"an integer of {value.bit_length()} bits"
    )
    return text if len(text) <= 80 else f"{text[:80]}..."


def bad_lora(
    what: str, *, where: object, expected: object = None, actual: object = None, hint: str | None = None
) -> HarnessError:
    """Return the error for an adapter that cannot be used."""
    hint = hint or "give the folder that PEFT's save_pretrained wrote, for this base model"
    return HarnessError(Code.BAD_LORA, what, where=where, expected=expected, actual=actual, hint=hint)


WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


_FEW_ROUNDINGS = 4
"""Size of an update, in units of its dtype's precision, below which a product may be within its bound without it."""
_MOST_ROWS = 256
"""Rows of a weight by which its size is told."""


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
        for folder in others:
            _know_adapter(hf, folder)
    return hf


def _know_adapter(hf: HFModel, folder: Path) -> None:
    """Keep the updates of another adapter in the modules that they belong to."""
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
    hf.lora_base = json.loads(files[0]).get("base_model_name_or_path")


def adapter_notes(hf: HFModel) -> Iterator[str]:
    """Yield notes on an adapter that was made for another model, or that changes next to nothing."""
    if hf.lora_base is not None and _last_part(str(hf.lora_base)) not in _names_of(hf.checkpoint):
        yield (
            f"the adapter's config names another base model, {_shown(hf.lora_base)}: whether it was made for this one "
            "was not checked"
        )
    adapted = [module for module in hf.model.modules() if isinstance(module, LoraLinear)]
    num_idle = sum(not (module.lora_a.any() and module.lora_b.any()) for module in adapted)
    if num_idle:
        yield (
            f"the adapter changes nothing at {num_idle} of its {len(adapted)} modules, where A or B is all zeros: "
            "whether the engine applies it there was not seen"
        )
    num_small = sum(0 < _size(module) < _FEW_ROUNDINGS * torch.finfo(module.weight.dtype).eps for module in adapted)
    if num_small:
        yield (
            f"the adapter changes the weights by a few roundings to {hf.dtype} or less at {num_small} of its "
            f"{len(adapted)} modules: whether the engine applies it there may not have been seen; float32 shows more"
        )


def _names_of(checkpoint: Checkpoint) -> set[str]:
    """Return what a checkpoint is called: by its folder, its config, and the hub's cache."""
    of_hub = (part.rpartition("--")[2] for part in checkpoint.folder.parts if part.startswith("models--"))
    return {_last_part(str(name)) for name in (checkpoint.folder, checkpoint.config.get("_name_or_path", ""), *of_hub)}


def _last_part(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1].casefold()


def _size(module: LoraLinear) -> float:
    """Return the norm of an adapter's update over that of the weight, by some of its rows, without computing either."""
    a, b = module.lora_a.float(), module.lora_b.float()
    update = ((b.T @ b) * (a @ a.T)).sum().clamp(min=0).sqrt()
    rows = module.weight[:: max(1, len(module.weight) // _MOST_ROWS)].float()
    weight = (rows.square().sum() * len(module.weight) / len(rows)).sqrt()
    return float(abs(module.scaling) * update / weight.clamp(min=1e-30))


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
