"""Options of the engine llamacpp, as `--engine-option NAME=VALUE`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness.checkpoint.gguf.types import BY_NAME
from harness.engines.adapter import refuse_unknown_options
from harness.errors import Code, HarnessError

CACHE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_KNOWN = (
    "cache_type", "cache_type_k", "cache_type_v", "flash_attention", "threads", "batch_size", "ubatch_size",
    "rope_freq_base", "repack", "gguf", "type", "lora", "lora_gguf",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppOptions:
    """Parameters of a context of llama.cpp; None leaves llama.cpp's own default."""

    cache_type_k: str = "F16"
    cache_type_v: str = "F16"
    flash_attention: str = "auto"
    threads: int = 1
    batch_size: int = 2048
    """Tokens that are given at once."""
    ubatch_size: int = 512
    """Tokens that llama.cpp computes at once."""
    rope_freq_base: float = 0.0
    """0: the model's."""
    repack: bool = True
    """Whether llama.cpp may put weights in another order for faster kernels (AMX among them)."""
    gguf: Path | None = None
    """File that the engine loads in the place of the model's: a fault of it is then the engine's."""
    lora: Path | None = None
    """Folder of an adapter in PEFT's format."""
    lora_gguf: Path | None = None
    """File of an adapter that the engine loads in the place of the one that is made of the folder."""
    type: str = "F32"
    """Type of the GGUF file that is made of a checkpoint that is none."""

    @property
    def cache_names(self) -> tuple[str, str]:
        """Types of the cache, of keys and of values."""
        return self.cache_type_k, self.cache_type_v

    @property
    def cache_types(self) -> tuple[int, int]:
        """Their numbers."""
        return BY_NAME[self.cache_type_k][0], BY_NAME[self.cache_type_v][0]


def parse_llamacpp_options(options: Mapping[str, str]) -> LlamaCppOptions:
    """Parse the options.

    Raises:
        HarnessError: BAD_OPTION: one that is not known, or an impossible value.
    """
    refuse_unknown_options("llamacpp", options, _KNOWN)
    both = options.get("cache_type", "F16")
    defaults = LlamaCppOptions()
    path = options.get("gguf")
    return LlamaCppOptions(
        cache_type_k=_choice("cache_type_k", options.get("cache_type_k", both), CACHE_TYPES),
        cache_type_v=_choice("cache_type_v", options.get("cache_type_v", both), CACHE_TYPES),
        flash_attention=_choice("flash_attention", options.get("flash_attention", "auto"), tuple(FLASH_ATTENTION)),
        threads=_count("threads", options, defaults.threads),
        batch_size=_count("batch_size", options, defaults.batch_size),
        ubatch_size=_count("ubatch_size", options, defaults.ubatch_size),
        rope_freq_base=_real("rope_freq_base", options),
        repack=_choice("repack", options.get("repack", "on"), ("on", "off")) == "on",
        gguf=None if path is None else _file("gguf", path),
        lora=Path(options["lora"]) if "lora" in options else None,
        lora_gguf=_file("lora_gguf", options["lora_gguf"]) if "lora_gguf" in options else None,
        type=_choice("type", options.get("type", defaults.type), ("F32", "F16", "BF16", "Q8_0", "Q4_0")),
    )


def _choice(name: str, value: str, known: tuple[str, ...]) -> str:
    found = next((each for each in known if each.lower() == value.lower()), None)
    return found if found is not None else _refuse(name, value, ", ".join(known))


def _count(name: str, options: Mapping[str, str], default: int) -> int:
    value = options.get(name, str(default))
    if not value.isdecimal() or not 1 <= int(value[:10]) < 2**31:
        _refuse(name, value, "a positive integer")
    return int(value)


def _real(name: str, options: Mapping[str, str]) -> float:
    value = options.get(name, "0")
    try:
        number = float(value)
    except ValueError:
        _refuse(name, value, "a positive number")
    return number if 0 <= number < 1e12 else _refuse(name, value, "a positive number")


def _file(name: str, value: str) -> Path:
    return Path(value) if Path(value).is_file() else _refuse(name, value, "a GGUF file")


def _refuse(name: str, value: str, expected: str) -> NoReturn:
    what = f"impossible value of the option {name}"
    raise HarnessError(Code.BAD_OPTION, what, where=f"--engine-option {name}", expected=expected, actual=value)
