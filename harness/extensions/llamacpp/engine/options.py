"""Options of the engine llamacpp, as `--engine-option NAME=VALUE`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FilePath, ValidationError

from harness.engines.adapter import refuse_unknown_options
from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.header import BY_NAME, PLAIN

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}

_Upper, _Lower = BeforeValidator(str.upper), BeforeValidator(str.lower)
_CacheType = Annotated[Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL"], _Upper]
_Count = Annotated[int, Field(ge=1, lt=2**31)]


class LlamaCppOptions(BaseModel):
    """Parameters of a context of llama.cpp."""

    model_config = ConfigDict(frozen=True)

    cache_type_k: _CacheType = "F16"
    cache_type_v: _CacheType = "F16"
    flash_attention: Annotated[Literal["auto", "off", "on"], _Lower] = "auto"
    threads: _Count = 1
    batch_size: _Count = 2048
    """Tokens that are given at once."""
    ubatch_size: _Count = 512
    """Tokens that llama.cpp computes at once."""
    rope_freq_base: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    """0: the model's."""
    repack: bool = True
    """Whether llama.cpp may put weights in another order for faster kernels (AMX among them)."""
    gguf: FilePath | None = None
    """File that the engine loads in the place of the model's: a fault of it is then the engine's."""
    lora: Path | None = None
    """Folder of an adapter in PEFT's format."""
    lora_gguf: FilePath | None = None
    """File of an adapter that the engine loads in the place of the one that is made of the folder."""
    mtp: bool = False
    """Whether to run the layers that predict further tokens, too: in architectures that are found by content."""
    type: Annotated[Literal["F32", "F16", "BF16", "Q8_0", "Q4_0"], _Upper] = "F32"
    """Type of the GGUF file that is made of a checkpoint that is none."""

    @property
    def cache_names(self) -> tuple[str, str]:
        """Types of the cache, of keys and of values."""
        return self.cache_type_k, self.cache_type_v

    @property
    def declared_cache(self) -> dict[str, Any]:
        """What the cache does to keys and values, as `Numerics` says it.

        Flash attention, which `auto` takes on a CPU, casts what is kept in float32:
        `llm_graph_context::build_attn_mha`.
        """
        names = [PLAIN.get(name, name) for name in self.cache_names]
        casts = "float32" in names and self.flash_attention != "off"
        keys, values = (None, None) if names == ["float32", "float32"] else names
        return {"cache": keys, "cache_values": values, "attention_inputs": "float16" if casts else None}

    @property
    def cache_types(self) -> tuple[int, int]:
        """Their numbers."""
        return BY_NAME[self.cache_type_k][0], BY_NAME[self.cache_type_v][0]


def parse_llamacpp_options(options: Mapping[str, str]) -> LlamaCppOptions:
    """Parse the options; `cache_type` stands for those of keys and values.

    Raises:
        HarnessError: BAD_OPTION: one that is not known, or an impossible value.
    """
    refuse_unknown_options("llamacpp", options, ("cache_type", *LlamaCppOptions.model_fields))
    fields: dict[str, Any] = dict(options)
    if "cache_type" in fields:
        both = fields.pop("cache_type")
        fields = {"cache_type_k": both, "cache_type_v": both, **fields}
    try:
        return LlamaCppOptions.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise HarnessError(
            Code.BAD_OPTION,
            f"impossible value of the option {name}",
            where=f"--engine-option {name}",
            expected=first["msg"].removeprefix("Input should be "),
            actual=first["input"],
        ) from error
