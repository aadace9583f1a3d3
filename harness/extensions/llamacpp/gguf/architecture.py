"""What the metadata and the tensor names of a GGUF file say of the model: HuggingFace's configuration and names.

Fails closed: what the metadata says and HF's configuration would not carry is refused, not left out.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.header import Value

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE_REVERSED = {module: name for name, module in _OUTSIDE.items()}
_IN_LAYER_REVERSED = {module: name for name, module in _IN_LAYER.items()}
_GGUF_LAYER, _HF_LAYER = "blk", "model.layers"
_NAME = re.compile(
    r"(?:(?P<layers>blk|model\.layers)\.(?P<layer>0|[1-9]\d{0,3})\.)?(?P<part>[\w.]+)\.(?P<kind>weight|bias)", re.ASCII
)

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor by which llama.cpp divides the rotary frequencies: Llama 3's scaling."""


def hf_name(name: str) -> str | None:
    """Return HF's name of a GGUF tensor: `model.layers.3.mlp.up_proj.weight` of `blk.3.ffn_up.weight`.

    None if these families have no such tensor.
    """
    return _renamed(name, _GGUF_LAYER, _HF_LAYER, _OUTSIDE, _IN_LAYER)


def gguf_name(name: str) -> str | None:
    """Return the GGUF name of one of HF's tensors; None if these families have no such tensor."""
    return _renamed(name, _HF_LAYER, _GGUF_LAYER, _OUTSIDE_REVERSED, _IN_LAYER_REVERSED)


def _renamed(
    name: str, layers: str, new_layers: str, outside: Mapping[str, str], in_layer: Mapping[str, str]
) -> str | None:
    """Return the other side's name, whose layers are called `new_layers`; None if a table has none."""
    match = _NAME.fullmatch(name)
    if match is None or match["layers"] not in (None, layers):
        return None
    prefix, table = ("", outside) if match["layer"] is None else (f"{new_layers}.{int(match['layer'])}.", in_layer)
    return f"{prefix}{table[match['part']]}.{match['kind']}" if match["part"] in table else None


def is_query_or_key(name: str) -> bool:
    """Whether HF's tensor makes queries or keys, whose rows Llama's GGUF has in another order."""
    return re.search(r"\.self_attn\.[qk]_proj\.(weight|bias)$", name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """A family of models that GGUF files are read of."""

    model_type: str
    class_name: str
    originals: tuple[str, ...]
    """Model types of HF's checkpoints that converters write as this family."""
    permutes_heads: bool = False
    """Whether the rows of q and k stand in the order of interleaved rotary pairs."""
    divides_frequencies: bool = False
    """Whether llama.cpp divides the rotary frequencies by the tensor `rope_freqs.weight`."""


FAMILIES = {
    "llama": GGUFFamily(
        model_type="llama",
        class_name="LlamaForCausalLM",
        originals=("llama", "mistral"),
        permutes_heads=True,
        divides_frequencies=True,
    ),
    "qwen2": GGUFFamily(model_type="qwen2", class_name="Qwen2ForCausalLM", originals=("qwen2",)),
    "qwen3": GGUFFamily(model_type="qwen3", class_name="Qwen3ForCausalLM", originals=("qwen3",)),
}
"""By `general.architecture`. Mistral's files say llama."""

_WITHOUT_EFFECT = frozenset({
    "vocab_size",  # the embedding has its rows
    "tensor_data_layout",  # names the order of rows that the architecture has anyway
    "rope.scaling.finetuned",  # says where the scaling comes from
    "attention.layer_norm_epsilon",  # of a norm that these architectures do not have
})  # fmt: skip
"""Settings that llama.cpp does not compute with in any of the families."""
_NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "use_parallel_residual": (False,),
}
"""Settings that change what a model computes, and the values with which they do not."""


class Metadata:
    """Typed access to the metadata of one file."""

    def __init__(self, values: Mapping[str, Value], where: object) -> None:
        self._values, self.where = values, where
        self._read: set[str] = set()
        self.architecture = self._text("general.architecture")

    @property
    def family(self) -> GGUFFamily:
        """The family; raises HarnessError (UNSUPPORTED_ARCHITECTURE) if it is none of those that are served."""
        if self.architecture not in FAMILIES:
            raise HarnessError(
                Code.UNSUPPORTED_ARCHITECTURE,
                f"GGUF files of the architecture {self.architecture!r} are not read",
                where=f"{self.where}: general.architecture",
                expected=", ".join(FAMILIES),
                actual=self.architecture,
                hint="check it against the checkpoint that it was made from: --hf CHECKPOINT",
            )
        return FAMILIES[self.architecture]

    def get(self, key: str) -> Value | None:
        """Return a value as it is, by its key without the architecture; None if there is none."""
        self._read.add(key)
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

    def require(self, key: str, expected: int) -> None:
        """Refuse a number that HF's configuration has no other value for; raises HarnessError (UNSUPPORTED_GGUF)."""
        if self.count(key, expected) != expected:
            raise self.unsupported(key, expected=expected)

    def refuse_unread(self) -> None:
        """Refuse every setting of the architecture that was not read, unless it is known to change nothing.

        Raises:
            HarnessError: UNSUPPORTED_GGUF, with the setting and its value.
        """
        prefix = f"{self.architecture}."
        for key in (name.removeprefix(prefix) for name in self._values if name.startswith(prefix)):
            if key in self._read or key in _WITHOUT_EFFECT:
                continue
            neutral = _NEUTRAL.get(key, ())
            if not _is_one_of(self._values[prefix + key], neutral):
                raise self.unsupported(key, expected=" or ".join(map(repr, neutral)) or None)

    def unsupported(self, key: str, *, expected: object = None) -> HarnessError:
        """Return the error for a setting that is not read."""
        return HarnessError(
            Code.UNSUPPORTED_GGUF,
            "a setting of the model is not read from GGUF metadata",
            where=f"{self.where}: {self.architecture}.{key}",
            expected=expected,
            actual=repr(self.get(key))[:100],
            hint="check the HuggingFace checkpoint that the file was made from",
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
            where=f"{self.where}: {prefix}{key}",
            expected=expected,
            actual=repr(value)[:100],
            hint="convert the model again",
        )


def _is_one_of(value: Value, values: tuple[Value, ...]) -> bool:
    return any(type(value) is type(item) and value == item for item in values)  # True is no 1.0


def hf_config(
    metadata: Metadata,
    *,
    vocab_size: int,
    is_tied: bool,
    rope_factors: list[float] | None,
    original_rope: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return config.json of the HF model with the metadata's sizes.

    `rope_factors` divide each rotary frequency, where they are there. `original_rope` has the rotary parameters of the
    checkpoint that the file was made from; the factors may be theirs.

    Raises:
        HarnessError: UNSUPPORTED_ARCHITECTURE, DAMAGED_GGUF, or UNSUPPORTED_GGUF where the metadata says what is not
            read.
    """
    family = metadata.family
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    own_dim = max(1, hidden // heads)
    head_dim = metadata.count("attention.key_length", own_dim)
    if metadata.count("attention.value_length", own_dim) != head_dim:
        raise metadata.unsupported("attention.value_length", expected=f"{head_dim}, as of keys")
    metadata.require("rope.dimension_count", head_dim)
    rope = _rope(metadata)
    if rope_factors is not None and rope_factors != [1.0] * (head_dim // 2):
        rope = _llama3_scaling(rope_factors, rope, head_dim, metadata, original_rope)
    config = {
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
    metadata.refuse_unread()
    return config


def _rope(metadata: Metadata) -> dict[str, Any]:
    """Return HF's rotary parameters; as in llama.cpp, a factor without a type is that of linear scaling."""
    kind, factor = metadata.get("rope.scaling.type"), metadata.get("rope.scaling.factor")
    linear = metadata.get("rope.scale_linear")
    metadata.get("rope.scaling.original_context_length")  # without yarn, nothing is computed with it
    base = metadata.real("rope.freq_base", 10000.0)
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": metadata.real("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.count(
                "rope.scaling.original_context_length", metadata.count("context_length")
            ),
            "beta_fast": metadata.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.real("rope.scaling.yarn_beta_slow", 1.0),
        }
    if kind not in (None, "none", "linear"):
        raise metadata.unsupported("rope.scaling.type", expected="none, linear or yarn")
    field, factor = ("rope.scale_linear", linear) if factor is None else ("rope.scaling.factor", factor)
    if kind == "none" or factor is None or _is_one_of(factor, (0.0, 1.0)):
        return {"rope_type": "default", "rope_theta": base}
    return {"rope_type": "linear", "rope_theta": base, "factor": metadata.real(field)}


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


def _llama3_scaling(
    factors: list[float],
    rope: Mapping[str, Any],
    head_dim: int,
    metadata: Metadata,
    original: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Find the settings of Llama 3's scaling that give these factors; nothing else divides frequencies in HF."""
    usual = {**rope, "rope_type": "llama3", "factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    candidates = [{**usual, "original_max_position_embeddings": 2**exponent} for exponent in range(4, 22)]
    if original is not None and original["rope_type"] == "llama3":
        candidates.insert(0, dict(original))  # with its own base, so that another base is not said to be other factors
    for scaling in candidates if rope["rope_type"] == "default" and metadata.family.divides_frequencies else ():
        if _are_close(llama3_factors(scaling, head_dim), factors):
            return {**scaling, "rope_theta": rope["rope_theta"]}
    usually = "low_freq_factor 1, high_freq_factor 4, an original length that is a power of two, no other scaling"
    raise HarnessError(
        Code.UNSUPPORTED_GGUF if original is None else Code.GGUF_DIFFERS,
        "the factors of the rotary frequencies are not those of Llama 3's scaling",
        where=f"{metadata.where}: rope_freqs.weight",
        expected=usually if original is None else f"those of {dict(original)}",
        actual=", ".join(f"{factor:.4g}" for factor in factors[:8]),
        hint="check the HuggingFace checkpoint that the file was made from" if original is None else "convert it again",
    )


def _are_close(ours: list[float], theirs: list[float]) -> bool:
    return len(ours) == len(theirs) and all(map(partial(math.isclose, rel_tol=1e-5), ours, theirs))
