"""What a KV cache in few bits costs: HuggingFace's attention reads what the cache gives back, an engine its own."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness.base.numerics import Numerics
from harness.errors import Code, HarnessError
from harness.extensions.quant.forward import Sequences, TypeRun, log_probabilities
from harness.formats.checkpoint.quantised import cache_scales
from harness.formats.recording import Recording, RequestInfo
from harness.formats.taps import LOGITS, Operation, prefix_of
from harness.judge.compare.cache_format import BLOCKS, FORMATS, GRIDS, CacheFormat
from harness.judge.jobs.opened import match_taps, open_planned, record_run
from harness.oracle.model import HFModel
from harness.oracle.watch import AttentionCall, Seeing, run_attention, watching
from harness.plan import Plan

_SCALE_BITS = 32
_BITS = {"Q8_0": 8.5, "Q5_0": 5.5, "Q5_1": 6, "Q4_0": 4.5, "Q4_1": 5, "IQ4_NL": 4.5, "mxfp4": 4.5, "nvfp4": 4.5}
"""Bits of a number with its share of its block's scale."""
_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
NAMES = (*_DTYPES, *FORMATS, *BLOCKS, *(f"{name}:{of}" for name in GRIDS for of in ("token", "head")))


def check_cache(name: str) -> str:
    """Return the name of a cache's format, with what has a scale that follows its largest number.

    Raises:
        HarnessError: BAD_OPTION.
    """
    if name not in NAMES:
        what = f"no cache is kept in {name!r}"
        raise HarnessError(Code.BAD_OPTION, what, where="--caches", expected=", ".join(NAMES), actual=name)
    return name


def run_cache(name: str, hf: HFModel, sequences: Sequences) -> TypeRun:
    """Measure a format, with the scales of the checkpoint where it has some and the name has none.

    Raises:
        HarnessError: BAD_OPTION: the model keeps latents, or the size of its heads is no multiple of the blocks'.
    """
    if getattr(hf.model.config.get_text_config(), "kv_lora_rank", None):
        what = "the model keeps latents in the place of keys and values"
        raise HarnessError(Code.BAD_OPTION, what, where=f"--caches {name}", hint="measure it without --caches")
    form, _, scale_of = name.partition(":")
    scales = {} if scale_of else cache_scales(hf.folder)
    numerics = Numerics(
        cache=form, cache_scale_of={"token": "token", "head": "head"}.get(scale_of),  # type: ignore[arg-type]
        cache_scales=scales if form in GRIDS or form == "nvfp4" else {},
    )  # fmt: skip
    cost = format_cost(numerics, hf, sequences, f"--caches {name}")
    return TypeRun(
        name=f"cache {name}",
        size_bytes=cost.size_bytes,
        bits_per_weight=cost.bits,
        tensor_types={},
        note="HuggingFace with such a cache: no engine; size of keys and values of the text, bits of one number of them"
        + (", with the checkpoint's scales" if numerics.cache_scales else ""),
        exact=hf,
        dequantised=cost.distributions,
        engine=cost.distributions,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatCost:
    """What HuggingFace's model says with a cache, and the cache's size."""

    distributions: list[torch.Tensor]
    """As `log_probabilities` returns them, of each sequence."""
    bits: float
    """Of one number, with its share of a scale."""
    size_bytes: int
    """Of keys and values of all sequences."""


def format_cost(numerics: Numerics, hf: HFModel, sequences: Sequences, where: str) -> FormatCost:
    """Run HuggingFace's model, whose attention reads keys and values as the declared cache gives them back.

    Raises:
        HarnessError: BAD_OPTION: the size of the model's heads is no multiple of the blocks', with `where` in it.
    """
    kept = _Kept(numerics)
    try:
        with torch.no_grad(), watching(hf) as watch, watch.showing(kept):
            distributions = [log_probabilities(hf, ids) for ids in sequences]
    except RuntimeError as error:  # unflatten, of heads that are no whole blocks
        raise HarnessError(
            Code.BAD_OPTION,
            "the cache's blocks do not fit the heads of the model",
            where=where,
            actual=str(error).splitlines()[0],
        ) from error
    bits = _bits(numerics, kept)
    return FormatCost(distributions=distributions, bits=bits, size_bytes=round(kept.num_elements * bits / 8))


class _Kept(Seeing):
    """Gives attention what the cache makes of keys and values."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__(lambda source, value: None)
        self._numerics = numerics
        self.num_elements = 0
        self.head_size = self.num_heads = 1

    def attend(self, call: AttentionCall, function: Callable[..., Any]) -> Any:
        """See `Watcher.attend`."""
        self.num_elements += call.key.numel() + call.value.numel()
        self.num_heads, self.head_size = call.key.shape[1], call.key.shape[3]
        key, value = (self._kept(call, part, x) for part, x in (("k", call.key), ("v", call.value)))
        return run_attention(replace(call, key=key, value=value), function)

    def _kept(self, call: AttentionCall, part: Any, x: torch.Tensor) -> torch.Tensor:
        """Return [B, K, S, H] as it comes back."""
        form = CacheFormat.declared(self._numerics, part, prefix_of(call.path), x.shape[1])
        if form is None:
            return x
        return form.unturned(form.stored(x).values).to(x.dtype)


def _bits(numerics: Numerics, kept: _Kept) -> float:
    """Return the bits of a key's number; those of values may be others."""
    form, scale_of = numerics.cache or "float32", numerics.cache_scale_of
    if form in _BITS:
        return _BITS[form]
    bits = 4 if form == "int4" else 8 if form == "int8" else 8 * getattr(torch, form).itemsize
    shared: Mapping[str, int] = {"token": kept.head_size * kept.num_heads, "head": kept.head_size}
    return bits + (_SCALE_BITS / shared[scale_of] if scale_of else 0)


def run_engine_cache(plan: Plan, hf: HFModel, sequences: Sequences, scratch: Path) -> TypeRun:
    """Let an engine compute each sequence, the first half as a prompt and the rest token by token.

    Its distributions are HuggingFace's head of what it has recorded before its own: engines compute the head only for
    rows that a token is chosen from.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: it has not recorded what the head is computed from, at every row; BAD_OPTION,
            as `format_cost`; as `open_planned` and `record_run`.
    """
    before_head = hf.graph[hf.graph[LOGITS].inputs[0]]
    prompts = [max(1, len(ids) // 2) for ids in sequences]
    engine: list[torch.Tensor] = []
    with open_planned(plan) as subject:
        match_taps(plan, subject, hf.graph)
        for ids, length in zip(sequences, prompts, strict=True):
            folder = scratch / "engine"
            record_run(
                plan, subject, plan.schedules[0], [RequestInfo(id=0, token_ids=ids, prompt_length=length)], folder
            )
            rows = _rows(folder, before_head.tap, len(ids), plan.case.engine)
            shutil.rmtree(folder)
            with _replaced_output(hf, before_head, rows):
                engine.append(log_probabilities(hf, ids))
        numerics = subject.capabilities.numerics or Numerics()
    cost = format_cost(numerics, hf, sequences, f"--engine {plan.case.engine}")
    return TypeRun(
        name=f"cache {numerics.cache or plan.case.dtype} of {plan.case.engine}",
        size_bytes=cost.size_bytes,
        bits_per_weight=cost.bits,
        tensor_types={},
        note=f"{plan.case.engine} in {plan.case.dtype}: half of each sequence as a prompt, the rest token by token; "
        "size of keys and values of the text, bits of one number of them",
        exact=hf,
        dequantised=cost.distributions,
        engine=engine,
        prompt_lengths=prompts,
    )


def _rows(folder: Path, tap: str, num_tokens: int, engine: str) -> torch.Tensor:
    """Return a tap at every position of the one request, [T, ...] float32."""
    rows_by_position: dict[int, torch.Tensor] = {}
    with Recording.open(folder, verify=False) as recording:
        for step in recording.steps:
            if step.phase == "readback" or not step.has(tap):
                continue
            rows, at = step.tap(tap).to(torch.float32), step.rows_of(tap)
            positions = step.position if at is None else step.position[at]
            rows_by_position.update(zip(positions.tolist(), rows, strict=True))
    if len(rows_by_position) != num_tokens:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"engine {engine!r} has not recorded {tap} at every row",
            where="--engine",
            expected=f"{num_tokens} rows",
            actual=len(rows_by_position),
            hint="leave --engine out: --caches gives the cost of a format without an engine",
        )
    return torch.stack([rows_by_position[position] for position in range(num_tokens)])


@contextmanager
def _replaced_output(hf: HFModel, operation: Operation, rows: torch.Tensor) -> Iterator[None]:
    """Let HuggingFace's model go on with an engine's rows of an operation."""

    def exchanged(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return rows.to(output.dtype).view_as(output)

    handle = hf.module(operation.module).register_forward_hook(exchanged)
    try:
        yield
    finally:
        handle.remove()
