"""Mistakes with the scales of a quantised KV cache, planted in the reference engine: what the check says of each.

    python -m tests.quantised_cache_faults [NAME ...]
    python -m tests.quantised_cache_faults --sound

The engine stores keys and values as a cache in few bits gives them back; how is written here once more, in the engine's
own dtypes, and not with the judge's code. It declares the format and the right scales.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.base.numerics import Numerics
from harness.errors import Code
from harness.extensions.faults.fault import FaultConfig, Variant
from harness.extensions.faults.reference.injection import replacing
from reference_engine.kv_cache import KVCache
from tests.fault_trial import CheckTrial, try_entry

NUM_LAYERS = 3
PROMPTS = ((1, 5, 9, 33, 77, 120, 4, 8, 9, 3, 200), (31, 7, 7, 8, 1, 90, 100, 40))
Change = Callable[[torch.Tensor, int, int], torch.Tensor]
"""From rows [T, K, H], the layer and the part (0 for keys) to what the cache gives back."""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST = {"mxfp4": 6.0, "nvfp4": 6.0, "int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def nearest(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return the nearest number of a format, float32."""
    if name.endswith("fp4"):
        return _E2M1[(x.abs()[..., None] >= (_E2M1[1:] + _E2M1[:-1]) / 2).sum(dim=-1)].copysign(x)
    if name.startswith("int"):
        return x.round().clamp(-_LARGEST[name] - 1, _LARGEST[name])
    return x.clamp(-_LARGEST[name], _LARGEST[name]).to(getattr(torch, name)).float()


def cut_off(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return the next number of a format towards zero, float32."""
    if name.endswith("fp4"):
        return _E2M1[(x.abs()[..., None] >= _E2M1).sum(dim=-1) - 1].copysign(x)
    if name.startswith("int"):
        return x.trunc().clamp(-_LARGEST[name] - 1, _LARGEST[name])
    bits, least = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}[name]
    step = torch.ldexp(torch.ones_like(x), (torch.frexp(x)[1] - 1).clamp(min=least) - bits)
    return (x / step).trunc().mul(step).clamp(-_LARGEST[name], _LARGEST[name])


@dataclass(frozen=True)
class Format:
    """A format of a cache with its scales, as an engine declares it."""

    name: str
    share: str
    """`tensor`, `head` (of one tensor), `token`, `token-head`, or `block`: 16 numbers of a head, of one tensor too."""

    @property
    def numerics(self) -> Numerics:
        if self.name == "mxfp4":
            return Numerics(cache=self.name)
        if self.share.startswith("token"):
            return Numerics(cache=self.name, cache_scale_of="token" if self.share == "token" else "head")
        scales = {
            f"model.layers.{layer}.{part}_cache": tuple(self.still(layer, at).flatten().tolist())
            for layer in range(NUM_LAYERS)
            for at, part in enumerate("kv")
        }
        return Numerics(cache=self.name, cache_scales=scales)

    def still(self, layer: int, part: int) -> torch.Tensor:
        """Return scales that a calibration may have found: [1, 1, 1] or [1, K, 1]."""
        largest = (4.0 + 1.5 * layer, 1.1 + 0.7 * layer)[part]
        if self.share == "block":
            largest /= 448  # the scales of blocks have this range
        heads = torch.tensor([1.0, 0.55]) if self.share == "head" else torch.ones(1)
        return (heads * largest / _LARGEST[self.name]).view(1, -1, 1)

    def scale(self, x: torch.Tensor, layer: int, part: int) -> torch.Tensor:
        if self.share == "block":
            return self.in_blocks(x, layer, part)
        if not self.share.startswith("token"):
            return self.still(layer, part)
        dims = (1, 2) if self.share == "token" else (2,)
        return x.float().abs().amax(dim=dims, keepdim=True).clamp(min=1e-12) / _LARGEST[self.name]

    def in_blocks(self, x: torch.Tensor, layer: int, part: int) -> torch.Tensor:
        """Return the scale of each block, for each of its numbers: [T, K, H]."""
        sixth = x.float().unflatten(-1, (-1, 16)).abs().amax(dim=-1) / 6
        if self.name == "mxfp4":
            scale = 2.0 ** sixth.clamp(min=1e-10).log2().ceil()
        else:
            still = self.still(layer, part)
            scale = (sixth / still).clamp(max=448).to(torch.float8_e4m3fn).float() * still
        return scale.where(scale > 0, torch.ones(())).repeat_interleave(16, dim=-1)

    def keep(self, x: torch.Tensor, layer: int, part: int, round: Any = nearest) -> torch.Tensor:
        scale = self.scale(x, layer, part)
        return (round(x.float() / scale, self.name) * scale).to(x.dtype)


def planted(change: Change) -> Any:
    """Store what a change makes of keys and of values."""

    def make(
        store: Callable[..., None], self: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        store(self, layer, change(k, layer, 0), change(v, layer, 1), slots)

    return replacing((KVCache, "store", make))


def _with(
    form: Format, scale: Callable[[torch.Tensor, int, int], torch.Tensor], parts: tuple[int, ...] = (0, 1)
) -> Change:
    """Keep some parts with another scale in layer 1."""

    def change(x: torch.Tensor, layer: int, part: int) -> torch.Tensor:
        if layer != 1 or part not in parts:
            return form.keep(x, layer, part)
        wrong = scale(x, layer, part)
        return (nearest(x.float() / wrong, form.name) * wrong).to(x.dtype)

    return change


def _one_sided(form: Format, part: int, what: str) -> Change:
    def change(x: torch.Tensor, layer: int, at: int) -> torch.Tensor:
        if layer != 1 or at != part:
            return form.keep(x, layer, at)
        scale = form.scale(x, layer, at)
        divided, as_it_is = nearest(x.float() / scale, form.name), nearest(x.float(), form.name)
        return {"not undone": divided, "not divided": as_it_is * scale, "twice": divided * scale * scale}[what].to(
            x.dtype
        )

    return change


def _cut(form: Format) -> Change:
    return lambda x, layer, part: form.keep(x, layer, part, cut_off if layer == 1 else nearest)


def faults(form: Format) -> Iterator[tuple[str, Change, str, str]]:
    """Yield mistakes in layer 1: name, what it does, the first tap that shows it, and what its name must contain."""
    keys, values = "model.layers.1.k_cache", "model.layers.1.v_cache"
    one = torch.ones(1, 1, 1)
    yield "scale is 1, keys", _with(form, lambda *_: one, (0,)), keys, "have a scale of 1"
    yield "scale is 1, values", _with(form, lambda *_: one, (1,)), values, "have a scale of 1"
    yield "scale is 1, both", _with(form, lambda *_: one), keys, "have a scale of 1"
    yield "not undone, keys", _one_sided(form, 0, "not undone"), keys, "not multiplied when they are read"
    yield "not undone, values", _one_sided(form, 1, "not undone"), values, "not multiplied when they are read"
    yield "not divided, keys", _one_sided(form, 0, "not divided"), keys, "not divided when they are stored"
    yield "undone twice, values", _one_sided(form, 1, "twice"), values, "multiplied by their scale twice"
    yield "cut off", _cut(form), keys, "are cut off"
    if form.share == "block":
        yield from _faults_of_blocks(form)
        return
    if form.share.startswith("token"):
        swapped = replace(form, share="token-head" if form.share == "token" else "token")
        said = "one for each head of a token" if form.share == "token" else "one for each token"
        yield "another share", _with(form, swapped.scale), keys, said
        return
    dynamic = replace(form, share="token-head")
    yield "of the layer before", _with(form, lambda x, layer, part: form.still(layer - 1, part)), keys, "model.layers.0"
    yield "of the next layer, values", _with(form, lambda x, layer, part: form.still(2, part), (1,)), values, "layers.2"
    yield (
        "K and V exchanged",
        _with(form, lambda x, layer, part: form.still(layer, 1 - part)),
        keys,
        "scale of the values",
    )
    yield "dynamic", _with(form, dynamic.scale), keys, "one for each head of a token"
    if form.share == "head":
        yield "next head", _with(form, lambda x, layer, part: form.still(layer, part).flip(1)), keys, "of the next head"


def _faults_of_blocks(form: Format) -> Iterator[tuple[str, Change, str, str]]:
    keys, values = "model.layers.1.k_cache", "model.layers.1.v_cache"

    def next_block(x: torch.Tensor, layer: int, part: int) -> torch.Tensor:
        return form.scale(x, layer, part).unflatten(-1, (-1, 16)).roll(-1, dims=-2).flatten(-2)

    yield "next block", _with(form, next_block), keys, "in each block the scale of the next"
    if form.name == "mxfp4":
        down = _with(form, lambda *arguments: form.scale(*arguments) / 2, (1,))
        yield "exponents rounded down, values", down, values, "exponents that are rounded down"
        return

    def read(power: int, faulty_part: int) -> Change:
        def change(x: torch.Tensor, layer: int, part: int) -> torch.Tensor:
            factor = form.still(layer, part) ** power if (layer, part) == (1, faulty_part) else 1.0
            return (form.keep(x, layer, part).float() * factor).to(x.dtype)

        return change

    yield "global scale not undone, keys", read(-1, 0), keys, "not multiplied by the scale of all blocks"
    yield "global scale twice, values", read(1, 1), values, "multiplied twice by the scale of all blocks"


FORMATS = (
    Format("float8_e4m3fn", "tensor"), Format("float8_e5m2", "tensor"), Format("int8", "tensor"),
    Format("float8_e4m3fn", "head"), Format("int8", "head"), Format("float8_e4m3fn", "token-head"),
    Format("int8", "token-head"), Format("int8", "token"), Format("int4", "token-head"),
    Format("mxfp4", "block"), Format("nvfp4", "block"),
)  # fmt: skip


def checked(
    form: Format, change: Change, *, dtype: str = "float32", schedule: str = "plain", model: str = "qwen3-tiny"
) -> CheckTrial:
    """Check the reference engine with such a cache."""
    setting = FaultConfig(
        model=model, dtype=dtype, schedule=schedule, numerics=form.numerics, prompts=PROMPTS, max_new_tokens=3
    )
    return try_entry(Variant(id="cache", summary="", setting=setting, inject=planted(change)))


def named(trial: CheckTrial, tap: str, cause: str) -> Mapping[str, Any]:
    """Say whether a fault was detected, at its place, and named."""
    assert trial.result is not None, trial.error
    findings = [
        finding for finding in trial.result.runs[0].findings if finding.tap and finding.code is not Code.TOKENS_DIFFER
    ]
    first = trial.result.runs[0].first_divergence
    at_first = next((finding for finding in findings if first is not None and finding.tap == first.tap), None)
    said = (
        at_first.explanation.cause
        if at_first is not None and at_first.explanation is not None and at_first.explanation.is_cause
        else ""
    )
    return {
        "detected": trial.is_alarm,
        "localised": first is not None and first.tap == tap,
        "named": "no" if not said else "yes" if cause in said else "wrongly",
        "cause": said,
    }


def main(names: list[str]) -> None:
    """Print a line for each fault."""
    scores = []
    for form in FORMATS:
        for name, change, tap, cause in faults(form):
            title = f"{form.name}, {form.share}: {name}"
            if names and not any(item in title for item in names):
                continue
            for dtype in ("float32", "bfloat16"):
                row = named(checked(form, change, dtype=dtype), tap, cause)
                scores.append(row)
                print(f"| {title} | {dtype} | " + " | ".join(str(item) for item in row.values()) + " |", flush=True)
    told = ", ".join(f"{how}: {sum(score['named'] == how for score in scores)}" for how in ("yes", "no", "wrongly"))
    places = sum(score["localised"] for score in scores)
    print(f"{len(scores)} faults: {sum(score['detected'] for score in scores)} detected, {places} localised, {told}")


def main_sound() -> None:
    """Print a line for each sound cache."""
    for form in FORMATS:
        for model in ("qwen3-tiny", "llama-tiny"):
            for dtype in ("float32", "bfloat16"):
                for schedule in ("batched", "chunked"):
                    trial = checked(form, form.keep, dtype=dtype, schedule=schedule, model=model)
                    runs = () if trial.result is None else trial.result.runs
                    conventions = sorted({tap.convention for run in runs for tap in run.taps if tap.convention})
                    first = runs[0].findings[0].message if runs and runs[0].findings else ""
                    said = f"{'alarm' if trial.is_alarm else 'pass'} | {conventions[:1]} | {first} {trial.error or ''}"
                    print(f"| {form.name}, {form.share} | {model} | {dtype} | {schedule} | {said} |", flush=True)


if __name__ == "__main__":
    main_sound() if sys.argv[1:] == ["--sound"] else main(sys.argv[1:])
