"""Rollouts and their fields: what trainers call them, each checked for what it must hold.

The names stand in verl's `DataProto`, TRL's `GRPOTrainer`, OpenRLHF's `Experience` and slime's `Sample` with its batch.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.rollout.result import TokenCounts

FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "prompt": {
        "any": ("prompt_ids", "prompt_token_ids"),
        "verl": ("prompts",),
        "trl": ("prompt_ids",),
    },
    "response": {
        "any": ("response_ids", "response_token_ids", "completion_token_ids"),
        "verl": ("responses",),
        "trl": ("completion_ids",),
    },
    "sequence": {
        "any": ("token_ids",),
        "verl": ("input_ids",),
        "openrlhf": ("sequences",),
        "slime": ("tokens",),
    },
    "num_response": {"slime": ("response_length", "response_lengths")},
    "attention_mask": {"verl": ("attention_mask",), "openrlhf": ("attention_mask",)},
    "prompt_mask": {"trl": ("prompt_mask",)},
    "mask": {
        "any": ("mask",),
        "verl": ("response_mask",),
        "trl": ("completion_mask",),
        "openrlhf": ("action_mask",),
        "slime": ("loss_mask", "loss_masks"),
    },
    "tool_mask": {"trl": ("tool_mask",)},
    "engine": {
        "any": ("engine_logprobs", "logprobs"),
        "verl": ("rollout_log_probs",),
        "trl": ("sampling_per_token_logps",),
        "openrlhf": ("rollout_log_probs",),
        "slime": ("rollout_log_probs",),
    },
    "trainer": {
        "any": ("trainer_logprobs",),
        "verl": ("old_log_probs",),
        "trl": ("old_per_token_logps",),
        "openrlhf": ("action_log_probs",),
        "slime": ("log_probs",),
    },
    "experts": {"any": ("routed_experts",), "verl": ("routed_experts",), "slime": ("rollout_routed_experts",)},
    "weight_version": {"any": ("weight_version",), "slime": ("weight_versions",)},
    "trainer_version": {"any": ("trainer_weight_version",)},
    "pack": {"any": ("pack",)},
    "sampling": {"any": ("sampling_params",), "verl": ("meta_info",)},
}
"""By a field of ours, the names that it has; rows may mix those of several frameworks."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Of the sampling parameters, those that change the distribution; they stand in `sampling`, or in the row itself."""


def names_of(field: str) -> tuple[str, ...]:
    """Return all names of a field, ours first."""
    return tuple(dict.fromkeys(name for names in FIELDS[field].values() for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters that the tokens of a row were sampled with, as far as they change the distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 for all tokens."""
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens could not be chosen."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One row. Its columns have an entry for each token, those of the prompt included."""

    row: int
    """Number in the file, from 0."""
    tokens: tuple[int, ...]
    num_prompt: int
    mask: tuple[bool, ...]
    """Tokens of the response that count."""
    engine: tuple[float | None, ...]
    """The engine's log probability of each token, nats."""
    trainer: tuple[float | None, ...] | None
    sampling: Sampling
    experts: tuple[tuple[int, ...], ...] | None = None
    """Routed experts of the leading tokens, those of all layers one after the other."""
    versions: tuple[str, ...] = ()
    """Versions of the weights that the record names, of either side."""
    num_padding: int = 0
    """Tokens of the record that the attention mask takes out; they are not in `tokens`."""
    pack: str | None = None
    """Rows with the same name were one sequence of the trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The rows of a file that are compared."""

    name: str
    rows: Sequence[Rollout]
    counts: TokenCounts
    unread: tuple[str, ...] = ()
    """Fields of the records that were not read: unknown ones, and further names of a field."""

    @property
    def has_trainer(self) -> bool:
        """Whether a row has log probabilities of the trainer."""
        return any(row.trainer is not None for row in self.rows)


_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-3, 1e3
_SOUND: dict[str, Callable[[float], bool]] = {
    "temperature": lambda x: _LEAST_TEMPERATURE <= x <= _MOST_TEMPERATURE,
    "top_p": lambda x: 0 < x <= 1,
    "min_p": lambda x: 0 <= x < 1,
    "top_k": lambda x: math.isfinite(x) and x == int(x),
}
_SOUND_TEXT = "temperature 0.001 to 1000, 0 < top_p <= 1, 0 <= min_p < 1, a whole top_k"


@dataclass(frozen=True, slots=True)
class Record:
    """One record."""

    fields: Mapping[str, Any]
    where: str

    def find(self, field: str) -> Any:
        """Return a field's value; None if the record has none."""
        name = self.name_of(field)
        return None if name is None else self.fields[name]

    def name_of(self, field: str) -> str | None:
        """Return the name that the record has for a field."""
        return next((name for name in names_of(field) if self.fields.get(name) is not None), None)

    def unread(self) -> list[str]:
        """Return the names that no field of ours has here."""
        read = {*SAMPLING, *map(self.name_of, FIELDS)}
        return [name for name, value in self.fields.items() if name not in read and value is not None]

    def entries(self, field: str) -> list[Any] | None:
        """Return a field that must be a list.

        Raises:
            HarnessError: ROLLOUT_MISALIGNED.
        """
        values = self.find(field)
        if values is not None and not isinstance(values, list):
            raise self.misaligned(f"{self.name_of(field)} is no list", "one entry a token", repr(values)[:60])
        return values

    def column(self, field: str, num_tokens: int, lengths: Collection[int]) -> list[Any] | None:
        """Return a field with one entry a token; a shorter field stands at the last tokens, with None before it.

        Raises:
            HarnessError: ROLLOUT_MISALIGNED: the field has none of these lengths.
        """
        values = self.entries(field)
        if values is None:
            return None
        if len(values) not in lengths:
            expected = " or ".join(map(str, sorted(lengths))) if len(lengths) < 4 else f"at most {num_tokens}"
            raise self.misaligned(f"{self.name_of(field)} does not fit the tokens", f"{expected} entries", len(values))
        return [*[None] * (num_tokens - len(values)), *values]

    def mask(self, field: str, num_tokens: int, lengths: Collection[int]) -> list[bool] | None:
        """Return a column of zeros and ones.

        Raises:
            HarnessError: ROLLOUT_MISALIGNED.
        """
        values = self.entries(field) or []
        odd = next((value for value in values if not isinstance(value, int | float) or value not in (0, 1)), 0)
        if odd != 0:
            raise self.misaligned(f"{self.name_of(field)} is no mask", "0 or 1 for each token", repr(odd)[:60])
        column = self.column(field, num_tokens, lengths)
        return None if column is None else [bool(value) for value in column]

    def sampling(self) -> Sampling:
        """Return the sampling parameters, which stand in an object of their own or in the record itself.

        Raises:
            HarnessError: ROLLOUT_MISALIGNED.
        """
        nested = self.find("sampling")
        if nested is not None and not isinstance(nested, dict):
            raise self.misaligned(f"{self.name_of('sampling')} is no object", "parameters by name", repr(nested)[:60])
        sampling_fields = {**(nested or {}), **self.fields}
        values = {name: sampling_fields[name] for name in SAMPLING if sampling_fields.get(name) is not None}
        for name, value in values.items():
            number = as_number(value)
            if number is None or not _SOUND[name](number):
                raise self.misaligned(f"{name} of the sampling makes no sense", _SOUND_TEXT, repr(value)[:60])
        if "top_k" in values:
            values["top_k"] = max(0, int(values["top_k"]))  # -1 means all tokens, as 0 does
        return Sampling(**values)

    def versions(self) -> tuple[str, ...]:
        """Return the versions of the weights that the record names, of either side."""
        versions: list[Any] = []
        for field in ("weight_version", "trainer_version"):
            value = self.find(field)
            versions += value if isinstance(value, list) else [] if value is None else [value]
        return tuple(sorted(set(map(str, versions))))

    def misaligned(self, what: str, expected: object, actual: object) -> HarnessError:
        """Return the error of a column that does not fit."""
        hint = "docs/rollouts.md says how columns are aligned"
        return HarnessError(
            Code.ROLLOUT_MISALIGNED, what, where=self.where, expected=expected, actual=actual, hint=hint
        )

    def without_tokens(self, what: str, expected: str, actual: object) -> HarnessError:
        """Return the error of a row without tokens or log probabilities."""
        hint = "docs/rollouts.md has a table of the fields' names"
        return HarnessError(
            Code.ROLLOUT_WITHOUT_TOKENS, what, where=self.where, expected=expected, actual=actual, hint=hint
        )


def as_number(value: Any) -> float | None:
    """Return a number as a float; None for anything else, and for an integer that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
