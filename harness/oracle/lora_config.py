"""The config of a LoRA adapter, `adapter_config.json`: which modules it changes, with which rank and which scale.

Every field means what it means to PEFT 0.21 (`AdapterConfig`, `check_target_module_exists`, `get_pattern_key`). What is
not listed here is refused unless it is null: PEFT has many variants that make another product of the same tensors, and
later versions add more. tests/unit/lora_cases.py holds this reader, the reference engine's and PEFT against each other.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.base.files import read_text
from harness.errors import Code, HarnessError

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


_OWN_KEY = r"(.*\.)?({})$"
_LAYER_KEY = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."
_Rank = Annotated[int, Field(gt=0, lt=2**31)]
_Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Regex = Annotated[str, AfterValidator(_compiles)]
_ModuleKey = Annotated[str, AfterValidator(_within(_OWN_KEY))]
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
        """Whether the module at `path` is one of those that are changed; `all-linear` says so of each."""
        if self.exclude_modules and _names(self.exclude_modules, path):
            return False
        if self.targets_all_linear:
            return True
        if isinstance(self.target_modules, str) or path in self.target_modules:
            return _names(self.target_modules, path)
        return _names(self.target_modules, path) and self._is_in_chosen_layer(path)

    def rank(self, path: str) -> int:
        """Return the rank of the module at `path`."""
        return _own(self.rank_pattern, path, self.r)

    def scaling(self, path: str) -> float:
        """Return alpha / r of the module at `path`; alpha / sqrt(r) for rank-stabilised LoRA."""
        rank = self.rank(path)
        return _own(self.alpha_pattern, path, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def _is_in_chosen_layer(self, path: str) -> bool:
        chosen = self.layers_to_transform
        if chosen is None or chosen == []:
            return True
        patterns = self.layers_pattern or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        keys = [_LAYER_KEY.format(pattern) for pattern in patterns] or [_ANY_LAYER]
        found = next((match for key in keys if (match := re.match(key, path))), None)
        if found is None or found["idx"] is None:
            return False
        return int(found["idx"]) in (chosen if isinstance(chosen, list) else [chosen])


def _names(modules: str | list[str], path: str) -> bool:
    """Whether a regular expression fits a whole path, or one of a list is its end."""
    if isinstance(modules, str):
        return re.fullmatch(modules, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in modules)


def _own(patterns: Mapping[str, _T] | None, path: str, default: _T) -> _T:
    """Return what the first pattern that fits the end of a path says; after a dot, or the whole path."""
    fits = (value for key, value in (patterns or {}).items() if re.match(_OWN_KEY.format(key), path))
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
