"""The options of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.errors import ConfigError

__all__ = ["DTYPES", "KV_CACHE_DTYPES", "EngineConfig"]

DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine. Those of speed (`cuda_graphs` to `compile_layers`) are served by the room `fast`.

    Raises:
        ConfigError: a value is impossible.
    """

    dtype: str = "auto"
    """`float32`, `bfloat16`, `float16`, or `auto`: the checkpoint's own."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:1`."""
    attention_backend: str = "paged"
    """`paged`, `contiguous` or `recompute`, and from the room `fast`: `cpp`, `triton` or `varlen`."""
    block_size: int = 16
    """Tokens in a KV block; only the paged backend has blocks."""
    kv_cache_dtype: str = "auto"
    """`auto`: that of the weights; or `float8_e4m3fn` or `float8_e5m2`: K and V are divided by a scale when they are
    stored, cut off at the largest number, rounded, and multiplied when they are read. Served by `paged`, `contiguous`
    and `triton`."""
    kv_cache_scales: tuple[tuple[float, float], ...] = ()
    """Those scales, of K and of V for each layer that keeps them; none: the checkpoint's, or 1 where it has none."""
    num_blocks: int | None = None
    """KV blocks of the paged backend, the null block among them; None: what the limits below can use, within 1 GiB on
    the CPU and within 80 % of the free memory on a GPU."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step, decoded and prefilled ones together."""
    max_num_seqs: int = 256
    """Requests that run at once."""
    max_model_len: int | None = None
    """Tokens of prompt and continuation together; None: what the model's rotary embedding is made for."""

    enable_prefix_caching: bool = False
    """Keep the K and V of requests for others that begin with the same tokens; needs a backend with blocks.

    Off unless asked for: an observer does not see the rows that a hit skips, and who checks an engine wants all."""
    num_speculative_tokens: int = 0
    """Tokens that each decode step guesses and verifies beside the next one; 0: none."""
    draft_model: str | None = None
    """Folder of a smaller checkpoint with the same vocabulary, which guesses; None: what followed the same tokens
    before."""
    seed: int = 0
    """The seed of requests that have none; their draws depend on it and on the order in which they were added."""
    cuda_graphs: bool = True
    """On a GPU, replay decode steps that were recorded once. Needs a backend that is made for it (`triton`); a step
    with an observer, or one of several ranks, runs as it is."""
    watch_graphs: bool = False
    """Record steps with an observer, too: every intermediate is copied within the recording, and shown after it was
    replayed. So a check judges recorded steps. It takes memory for a step's intermediates in each recording."""
    fused_kernels: bool = True
    """With the backends `triton` and `cpp`, norms with residuals, norms of heads with rotary, and SiLU with its product
    are one kernel each; layers that are compiled are not fused by hand as well."""
    widen_weights: bool | None = None
    """Keep a second copy of large weights in 16 bits for products of several rows. On a CPU without instructions for
    the dtype it is one in float32, three times the memory in all, with which these take a fraction of the time; the
    backend `cpp` needs none there. On a CPU that has them, `cpp` keeps a packed copy beside the plain weights, which it
    reads for one row. None: where the copies fit into half of the available memory."""
    compile_layers: bool = False
    """Let torch.compile fuse what a layer does between its matrix products. The first steps then take a minute or so; a
    step with an observer runs as it is written. Meant for a GPU: on the CPU the compiler cannot read packed
    weights, and is slower without them."""
    async_scheduling: bool = False
    """Launch a decode step before the tokens that it continues are read: they stay on the device, and the host does its
    work while the device computes. Tokens are the same (`in_flight` has what is waited for all the same, an observer
    among it). Off: on a CPU it gains nothing, on a GPU it has not been timed, and a step's time as its caller measures
    it is then that of parts of two."""
    debug_checks: bool = False
    """Verify the cache's invariants at every step, and fill freed blocks with NaN. Slow."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(
                "unknown dtype", where="EngineConfig.dtype", expected=f"auto, {', '.join(DTYPES)}", actual=self.dtype
            )
        if self.kv_cache_dtype not in ("auto", *KV_CACHE_DTYPES):
            raise ConfigError(
                "unknown dtype of the KV cache", where="EngineConfig.kv_cache_dtype",
                expected=f"auto, {', '.join(KV_CACHE_DTYPES)}", actual=self.kv_cache_dtype,
            )  # fmt: skip
        if not all(0 < scale < math.inf for scales in self.kv_cache_scales for scale in scales):
            raise ConfigError(
                "a scale of the KV cache is none that can be divided by", where="EngineConfig.kv_cache_scales",
                expected="positive numbers, one of K and one of V for each layer", actual=self.kv_cache_scales,
            )  # fmt: skip
        self._check_at_least("block_size", 1)
        self._check_at_least("num_blocks", 2)
        self._check_at_least("max_num_batched_tokens", 1)
        self._check_at_least("max_num_seqs", 1)
        self._check_at_least("max_model_len", 1)
        self._check_at_least("seed", 0)
        self._check_at_least("num_speculative_tokens", 0)
        if self.draft_model is not None and not self.num_speculative_tokens:
            raise ConfigError(
                "a draft model without drafts", where="EngineConfig.num_speculative_tokens", expected="at least 1",
                actual=0,
            )  # fmt: skip
        switches = ("enable_prefix_caching", "cuda_graphs", "watch_graphs", "fused_kernels", "compile_layers")
        for name in (*switches, "async_scheduling", "debug_checks"):
            self._check_boolean(name)
        if self.widen_weights is not None:
            self._check_boolean("widen_weights")

    def _check_boolean(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise ConfigError(
                f"{name} is no boolean", where=f"EngineConfig.{name}", expected="True or False", actual=repr(value)
            )

    def _check_at_least(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        optional = name in ("num_blocks", "max_model_len")
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(
                f"{name} is too small or no integer", where=f"EngineConfig.{name}",
                expected=f"an integer of at least {minimum}", actual=repr(value),
            )  # fmt: skip

    def resolve_dtype(self, model_config: ModelConfig) -> str:
        """Return the name of the dtype of weights and activations.

        Raises:
            ConfigError: the checkpoint's own is asked for, and is not supported.
        """
        name = (model_config.dtype or "float32") if self.dtype == "auto" else self.dtype
        if name not in DTYPES:
            raise ConfigError(
                "the checkpoint's dtype is not supported", where="config.json", expected=" or ".join(DTYPES),
                actual=name, hint="Name one with EngineConfig.dtype.",
            )  # fmt: skip
        return name

    def resolve_max_model_len(self, model_config: ModelConfig) -> int:
        """Return the most tokens of prompt and continuation together.

        Raises:
            ConfigError: more are asked for than the model allows.
        """
        limit = model_config.rope.max_positions(model_config.max_position_embeddings)
        if self.max_model_len is not None and self.max_model_len > limit:
            raise ConfigError(
                "max_model_len is more than the model allows", where="EngineConfig.max_model_len",
                expected=f"at most {limit}, by max_position_embeddings and the rotary scaling",
                actual=self.max_model_len,
            )  # fmt: skip
        return self.max_model_len or limit

    def check_model(self, model_config: ModelConfig, *, has_adapters: bool, has_ranks: bool) -> None:
        """Refuse what cannot be served together.

        Raises:
            ConfigError: adapters, of which a part would be left out; or compiled layers that are recurrent.
        """
        obstacles = {
            "several ranks": has_ranks,
            "recurrent layers": bool(model_config.delta_nets),
            "latent attention": model_config.latent is not None,
        }
        for name in (name for name, is_there in obstacles.items() if has_adapters and is_there):
            raise ConfigError("adapters are not served with this", where="EngineConfig", expected="off", actual=name)
        if self.compile_layers and model_config.delta_nets:
            raise ConfigError(
                "recurrent layers are not compiled", where="EngineConfig.compile_layers", expected=False, actual=True
            )

    def check_prefix_caching(self, has_blocks: bool, backends_with_blocks: Iterable[str]) -> None:
        """Refuse a prefix cache whose attention backend has no blocks.

        Raises:
            ConfigError: it has none.
        """
        if self.enable_prefix_caching and not has_blocks:
            raise ConfigError(
                "prefix caching needs blocks", where="EngineConfig.enable_prefix_caching",
                expected=f"attention_backend {' or '.join(backends_with_blocks)}", actual=self.attention_backend,
            )  # fmt: skip
