"""What the metadata of a GGUF file says of the model: HuggingFace's configuration.

Fails closed: what the metadata says and HF's configuration would not carry is refused, not left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from harness.errors import Code, HarnessError
from harness.formats.checkpoint.gguf.header import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models that GGUF files are read of."""

    model_type: str
    class_name: str
    permutes_heads: bool = False
    """Whether the rows of q and k stand in the order of interleaved rotary pairs."""


FAMILIES = {
    "llama": Family(model_type="llama", class_name="LlamaForCausalLM", permutes_heads=True),
    "qwen2": Family(model_type="qwen2", class_name="Qwen2ForCausalLM"),
    "qwen3": Family(model_type="qwen3", class_name="Qwen3ForCausalLM"),
}
"""By `general.architecture`. Mistral's files say llama."""

_NOT_READ = ("rope.scaling.type", "attention.sliding_window", "expert_count", "logit_scale", "residual_scale",
             "embedding_scale", "attention.scale")  # fmt: skip
"""Settings that change what a model computes and that no configuration here carries."""
_HARMLESS = (None, 0, 0.0, 1.0, "none")


class Metadata:
    """Typed access to the metadata of one file."""

    def __init__(self, values: Mapping[str, Value], where: object) -> None:
        self._values, self._where = values, where
        self.architecture = self._text("general.architecture")

    @property
    def family(self) -> Family:
        """The family; raises HarnessError (UNSUPPORTED_ARCHITECTURE) if it is none of those that are served."""
        if self.architecture not in FAMILIES:
            raise HarnessError(
                Code.UNSUPPORTED_ARCHITECTURE,
                f"GGUF files of the architecture {self.architecture!r} are not read",
                where=f"{self._where}: general.architecture",
                expected=", ".join(FAMILIES),
                actual=self.architecture,
                hint="check the HuggingFace checkpoint that the file was made from",
            )
        return FAMILIES[self.architecture]

    def get(self, key: str) -> Value | None:
        """Return a value as it is, by its key without the architecture; None if there is none."""
        return self._values.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value < 2**31:
            self._refuse(key, "a positive integer", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not float or not 0 < value < math.inf:
            self._refuse(key, "a positive number", value)
        return value

    def refuse_unread(self) -> None:
        """Refuse settings that change what the model computes and that are not read."""
        for key in _NOT_READ:
            if self.get(key) not in _HARMLESS:
                raise HarnessError(
                    Code.UNSUPPORTED_GGUF,
                    "a setting of the model is not read from GGUF metadata",
                    where=f"{self._where}: {self.architecture}.{key}",
                    actual=self.get(key),
                    hint="add --hf FOLDER, the HuggingFace checkpoint that the file was made from",
                )

    def _text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            self._refuse(key, "a text", value, prefix="")
        return value

    def _refuse(self, key: str, expected: str, value: object, prefix: str | None = None) -> NoReturn:
        prefix = f"{self.architecture}." if prefix is None else prefix
        raise HarnessError(
            Code.DAMAGED_GGUF,
            "a value of the metadata is missing or impossible",
            where=f"{self._where}: {prefix}{key}",
            expected=expected,
            actual=repr(value)[:100],
            hint="convert the model again",
        )


def hf_config(
    metadata: Metadata, *, vocab_size: int, is_tied: bool, rope_factors: list[float] | None
) -> dict[str, Any]:
    """Return config.json of the HF model with the metadata's sizes.

    Args:
        metadata: of the file.
        vocab_size: rows of the embedding.
        is_tied: whether the file has no head of its own.
        rope_factors: by what each rotary frequency is divided, where it is.

    Raises:
        HarnessError: UNSUPPORTED_ARCHITECTURE, DAMAGED_GGUF, or UNSUPPORTED_GGUF where the metadata says what is not
            read.
    """
    family = metadata.family
    metadata.refuse_unread()
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", metadata.count("rope.dimension_count", max(1, hidden // heads)))
    base = metadata.real("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if rope_factors is not None:
        rope = _llama3_scaling(rope_factors, base, head_dim, metadata)
    return {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "vocab_size": vocab_size,
    }


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> list[float]:
    """Return by what each rotary frequency is divided under Llama 3's scaling: head_dim / 2 numbers.

    Source: `_compute_llama3_parameters` of transformers; convert_hf_to_gguf.py writes the same numbers.
    """
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    length = rope["original_max_position_embeddings"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        smooth = (length / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _llama3_scaling(factors: list[float], base: float, head_dim: int, metadata: Metadata) -> dict[str, Any]:
    """Find the settings of Llama 3's scaling that give these factors; nothing else divides frequencies in HF."""
    for exponent in range(4, 22):
        rope = {
            "rope_type": "llama3",
            "rope_theta": base,
            "factor": float(max(factors, default=1.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2**exponent,
        }
        wanted = llama3_factors(rope, head_dim)
        if len(wanted) == len(factors) and all(
            math.isclose(ours, theirs, rel_tol=1e-5) for ours, theirs in zip(wanted, factors, strict=True)
        ):
            return rope
    raise HarnessError(
        Code.UNSUPPORTED_GGUF,
        "the factors of the rotary frequencies are not those of Llama 3's scaling",
        where=f"{metadata._where}: rope_freqs.weight",
        expected="low_freq_factor 1, high_freq_factor 4, an original length that is a power of two",
        actual=", ".join(f"{factor:.4g}" for factor in factors[:8]),
        hint="add --hf FOLDER, the HuggingFace checkpoint that the file was made from",
    )
