"""The description of a model: config.json.

One decoder serves every family: what differs between them is the table in `families`, not a copied class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reference_engine.checkpoint.config_file import ConfigFields, read_json
from reference_engine.checkpoint.delta_net import DeltaNetShape
from reference_engine.checkpoint.families import FAMILIES, Family, MLPShape
from reference_engine.checkpoint.latent import LatentShape
from reference_engine.checkpoint.quantisation import Quantisation
from reference_engine.checkpoint.rope_config import RopeConfig, read_ropes
from reference_engine.checkpoint.sliding_window import layer_windows
from reference_engine.errors import ConfigError, UnsupportedModelError

__all__ = ["ModelConfig", "RopeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes and switches of one decoder."""

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Of latent attention, the part of a head that is rotated."""
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    local_rope: RopeConfig | None
    """Of layers with a window if it is another; None: `rope`."""
    layer_windows: tuple[int | None, ...]
    """Latest tokens that each layer sees, itself included; None: all of them."""
    mlps: Mapping[int, MLPShape]
    """By layer, what stands in the place of an MLP of `intermediate_size`."""
    delta_nets: Mapping[int, DeltaNetShape]
    """By layer, what stands in the place of attention."""
    latent: LatentShape | None
    """What stands in its place in all layers."""
    quantisation: Quantisation | None
    """The form of weights that have scales; None: they are numbers of the checkpoint's dtype."""
    dtype: str | None
    """The checkpoint's dtype, where config.json names it."""
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json, and the end-of-sequence ids of generation_config.json where it exists.

        Raises:
            ConfigError: a file is missing, is not JSON, or holds an impossible value.
            UnsupportedModelError: the model asks for what this engine does not have.
        """
        path = Path(folder) / "config.json"
        generation_path = Path(folder) / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        return cls.from_dict(read_json(path), generation, where=str(path))

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, where: str = "config.json"
    ) -> ModelConfig:
        """Interpret the content of config.json; `where` names it in errors, which are those of `from_folder`."""
        fields = ConfigFields(config, where)
        family = _family(fields)
        _refuse_unsupported(fields, family)
        hidden_size = fields.positive_int("hidden_size")
        num_heads = fields.positive_int("num_attention_heads")
        attention_bias = fields.boolean("attention_bias", default=False)
        max_position_embeddings = fields.positive_int(
            "max_position_embeddings", default=family.default_max_position_embeddings
        )
        rope, local_rope = read_ropes(fields, family, max_position_embeddings)
        latent = None if family.latent is None else family.latent(fields)
        default_head_dim = family.default_head_dim or max(1, hidden_size // num_heads)
        model = cls(
            model_type=config["model_type"],
            family=family,
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("intermediate_size"),
            num_hidden_layers=fields.positive_int("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=fields.positive_int("num_key_value_heads", default=num_heads),
            head_dim=latent.rotary_dim if latent is not None else fields.positive_int("head_dim", default_head_dim),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=family.ties_head_by_default),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=family.has_mlp_bias and fields.boolean("mlp_bias", default=False),
            qk_norm=family.qk_norm,
            rope=rope,
            local_rope=local_rope,
            layer_windows=layer_windows(fields, family),
            mlps=family.mlps(fields),
            delta_nets=family.delta_nets(fields),
            latent=latent,
            quantisation=Quantisation.of(config, where),
            dtype=config.get("dtype") or config.get("torch_dtype"),
            eos_token_ids=_eos_token_ids(generation or {}, config, where),
        )
        model._check_heads(fields)
        if latent is not None and model.quantisation is not None:
            raise UnsupportedModelError(
                "latent attention is not served with quantised weights", where=where, expected="no quantization_config",
                actual=f"{model.quantisation.dtype} weights",
            )  # fmt: skip
        return model

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that keep K and V."""
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.delta_nets)

    @property
    def rotary_dim(self) -> int:
        """Width of the part of each head that is rotated."""
        return int(self.head_dim * self.rope.partial_factor)

    @property
    def score_scale(self) -> float:
        """Factor of attention's scores."""
        if self.latent is None:
            return float(self.head_dim**-0.5)
        return float(self.latent.head_dim**-0.5) * self.rope.score_growth

    def shard(self, num_ranks: int) -> ModelConfig:
        """Return what the model looks like to one of several ranks.

        Raises:
            ConfigError: something does not divide; the message has the numbers.
        """
        whole = "recurrent layers are" if self.delta_nets else "latent attention is" if self.latent else None
        if whole is not None and num_ranks > 1:
            raise ConfigError(
                f"{whole} not split among ranks", where="tensor parallel", expected="1 rank",
                actual=f"{num_ranks} ranks",
            )  # fmt: skip
        shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        for name in shared:
            if getattr(self, name) % num_ranks:
                raise ConfigError(
                    f"{name} does not divide among the ranks", where="tensor parallel",
                    expected=f"a number of ranks that divides {getattr(self, name)}", actual=f"{num_ranks} ranks",
                )  # fmt: skip
        mlps = {layer: mlp.shard(num_ranks) for layer, mlp in self.mlps.items()}
        return replace(self, mlps=mlps, **{name: getattr(self, name) // num_ranks for name in shared})

    def _check_heads(self, fields: ConfigFields) -> None:
        where = fields.where
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "query heads do not divide among the KV heads", where=where,
                expected=f"num_attention_heads a multiple of num_key_value_heads = {self.num_key_value_heads}",
                actual=self.num_attention_heads,
            )  # fmt: skip
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ConfigError(
                "rotary embedding needs pairs", where=where, expected="an even head_dim, times partial_rotary_factor",
                actual=self.rotary_dim,
            )  # fmt: skip
        scalar = fields.values.get("query_pre_attn_scalar")
        if scalar not in (None, self.head_dim):
            raise UnsupportedModelError(
                "unsupported query_pre_attn_scalar", where=where, expected=f"head_dim = {self.head_dim}", actual=scalar
            )


def _family(fields: ConfigFields) -> Family:
    model_type = fields.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModelError(
            "unsupported model_type", where=fields.where, expected=f"one of {', '.join(FAMILIES)}", actual=model_type
        )
    family = FAMILIES[model_type]
    architectures = fields.values.get("architectures") or [family.architecture]
    if not isinstance(architectures, list) or family.architecture not in architectures:
        raise UnsupportedModelError(
            "unsupported architecture", where=fields.where, expected=family.architecture, actual=architectures
        )
    return family


def _refuse_unsupported(fields: ConfigFields, family: Family) -> None:
    """Refuse what would silently compute something else."""
    values, where = fields.values, fields.where
    activation = values.get(family.activation_field, family.activation)
    if activation != family.activation:
        raise UnsupportedModelError(
            f"unsupported {family.activation_field}", where=where, expected=family.activation, actual=activation
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if values.get(name):
            raise UnsupportedModelError(f"unsupported {name}", where=where, expected="none", actual=values[name])


def _eos_token_ids(generation: Mapping[str, Any], config: Mapping[str, Any], where: str) -> frozenset[int]:
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ConfigError(
            "eos_token_id is no token id", where=where, expected="an integer or a list of integers", actual=eos
        )
    return frozenset(ids)
