"""What HF itself does with a model of the zoo: alive, causal, finite in every dtype, the same in decode, from disk."""

import inspect
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from harness.extensions.faults.zoo.models import load, logits, tokens
from harness.extensions.faults.zoo.quiet import quiet

from .architectures import one_line

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EARLY, LATE = 5, 40  # the token that is changed, and the token whose logits must feel it
NUM_PROMPT = 40  # tokens before decode starts, one token a step
CACHES = ("cache", "past_key_values", "cache_params", "state")  # names under which models return a cache, and take it
ROUNDING = 1e-3  # differences up to here are rounding; the largest seen is 3e-5

HF_FAILS = {
    "bamba": {"bare decode": "positions start at 0 again in each step, if position ids are not passed"},
    "blt": {"decode": "BltConfig has no num_hidden_layers, of which the cache is made"},
    "deepseek_v4": {"float16": "modules that stay in float32 are given float16"},
    "inkling2_text": {"float64": "the router's input is lowered to float32, its weight is not"},
    "openai-gpt": {"decode": "it has no cache"},
    "recurrent_gemma": {"bare decode": "it makes a cache and does not return it: pass one"},
    "xglm": {"float64": "the lowest float64 is written into a float32 mask"},
    "xlstm": {"bfloat16": "a float32 state is multiplied with bfloat16", "float16": "the same"},
}
"""What transformers 5.23 cannot do with an architecture, and why. test_zoo.py finds these and no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What one model did. Differences of logits are the largest, in standard deviations of the logits."""

    logits_std: float
    influence: float
    """How far a changed token 5 moves the logits of token 40."""
    leak: float
    """How far a changed token 40 moves the logits before it: 0, or rounding where experts are computed in groups."""
    reload: float
    """How far the logits of the model loaded from disk are from the original's."""
    errors: dict[str, str]
    """Why the forward failed, for each dtype in which it did, loaded as HF loads it."""
    decode: float | str
    """How far decode is from the full forward, or why it failed: position ids are passed, and a cache if need be."""
    bare_decode: float | str
    """The same with nothing but a token and the cache that the model returned."""

    def problems(self) -> set[str]:
        """Return what is not as it should be, by the names of HF_FAILS, or by a field's name."""
        problems = set(self.errors)
        problems |= {"logits_std"} if not 0.1 < self.logits_std < 30 else set()
        problems |= {"influence"} if self.influence < ROUNDING else set()
        problems |= {"leak"} if self.leak > ROUNDING else set()
        # Weights from disk lie elsewhere in memory, and a kernel may take another way by that.
        problems |= {"reload"} if self.reload > ROUNDING else set()
        if is_off(self.decode):
            return problems | {"decode"}
        return problems | ({"bare decode"} if is_off(self.bare_decode) else set())


def is_off(decoded: float | str) -> bool:
    return isinstance(decoded, str) or decoded > ROUNDING


def behaviour(model: PreTrainedModel) -> Behaviour:
    """Try a float32 model of the zoo."""
    ids = tokens()
    full = logits(model, ids)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        reload = distance(logits(load(Path(folder)), ids), full)
        errors = {str(dtype).removeprefix("torch."): error_in(Path(folder), dtype, ids) for dtype in DTYPES}
    return Behaviour(
        logits_std=float(full.std()),
        influence=distance(logits(model, changed(ids, EARLY))[LATE], full[LATE]),
        leak=distance(logits(model, changed(ids, LATE))[:LATE], full[:LATE]),
        reload=reload,
        errors={dtype: error for dtype, error in errors.items() if error is not None},
        decode=decode_distance(model, ids, full, bare=False),
        bare_decode=decode_distance(model, ids, full, bare=True),
    )


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference in standard deviations of what was expected; not a number counts as infinite."""
    return float(((actual - expected).abs().max() / expected.std()).nan_to_num(torch.inf))


def changed(ids: torch.Tensor, position: int) -> torch.Tensor:
    """Return a copy of ids [1, T] with another token at one position."""
    ids = ids.clone()
    ids[0, position] = 3 + (ids[0, position] - 2) % 240
    return ids


def error_in(folder: Path, dtype: torch.dtype, ids: torch.Tensor) -> str | None:
    """Say why a forward in a dtype fails or is not finite, or return None."""
    try:
        model = load(folder, dtype=dtype)
        if dtype == torch.float64:
            model.config._experts_implementation = "eager"  # grouped products know no float64
        return None if logits(model, ids).isfinite().all() else "not finite"
    except Exception as error:
        return one_line(error)


def decode_distance(model: PreTrainedModel, ids: torch.Tensor, full: torch.Tensor, *, bare: bool) -> float | str:
    """Compare decode with the full forward's logits [T, V], or say why it failed."""
    try:
        return distance(decode(model, ids, bare=bare), full)
    except Exception as error:
        return one_line(error)


@torch.no_grad()
def decode(model: PreTrainedModel, ids: torch.Tensor, *, bare: bool) -> torch.Tensor:
    """Return logits [T, V]: a prompt at once, then a token a step.

    Args:
        model: in any dtype.
        ids: [1, T].
        bare: pass nothing but tokens and the cache that the model returned; otherwise position ids too, and a cache of
            our own to a model that takes one and returns none.

    Raises:
        ValueError: the model returned no cache, and was given none.
    """
    taken = inspect.signature(model.forward).parameters
    output = model(input_ids=ids[:, :NUM_PROMPT], use_cache=True)
    cache = cache_in(output)
    argument = next((name for name in CACHES[:2] if name in taken), None)
    if not cache and not bare and argument is not None:
        cache = {argument: DynamicCache(config=model.config)}
        output = model(input_ids=ids[:, :NUM_PROMPT], use_cache=True, **cache)
    if not cache:
        raise ValueError("the model returns no cache")
    rows = [output.logits[0]]
    for at in range(NUM_PROMPT, ids.shape[1]):
        position = {} if bare or "position_ids" not in taken else {"position_ids": torch.tensor([[at]])}
        output = model(input_ids=ids[:, at : at + 1], use_cache=True, **position, **cache)
        cache = cache_in(output) or cache
        rows.append(output.logits[0])
    return torch.cat(rows)


def cache_in(output: Any) -> dict[str, Any]:
    """Return the cache in a model's output, under the name by which the model takes it back."""
    fields = dict(output.items())  # an output of transformers 5.24 answers to old names, too
    return {name: fields[name] for name in CACHES if fields.get(name) is not None}
