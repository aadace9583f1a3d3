"""Drawing of faults: what, where, and whether it changes anything beyond rounding."""

import copy
import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
from torch import nn

from harness.extensions.faults.drawn import edits, slips
from harness.extensions.faults.drawn.edits import Edit
from harness.extensions.faults.fault import ANY_ROW, Category, EngineKind, Fault, FaultConfig
from harness.extensions.faults.modules.declaring import NUM_NEW_TOKENS, module_prompts
from harness.extensions.faults.operations import ATTENTION
from harness.extensions.faults.zoo.divergence import first_difference, trace
from harness.extensions.faults.zoo.models import build
from harness.oracle.caches import caches_of

KINDS: Mapping[str, Callable[[nn.Module, Random], Edit | None]] = {
    "edit": edits.edit,
    "config": slips.config_field,
    "cache": slips.cache_rows,
    "weight": slips.one_weight,
    "known": slips.known_mistake,
}
CATEGORIES = {
    "edit": Category.WIRING, "config": Category.NUMBERS, "cache": Category.CACHE, "weight": Category.WEIGHTS,
    "known": Category.ATTENTION,
}  # fmt: skip
FAMILIES = (
    "olmo2", "starcoder2", "gemma2", "cohere2", "exaone4", "gpt_oss", "granite", "persimmon", "phi", "gpt2", "stablelm",
    "olmo", "nemotron", "bloom", "gpt_neox", "glm4", "opt", "phi3", "seed_oss", "helium", "mixtral", "qwen2_moe",
    "olmoe", "deepseek_v3", "glm4_moe", "falcon", "gptj", "codegen", "mpt", "xglm", "arcee", "smollm3", "ernie4_5",
    "mamba2", "qwen3_next", "jamba", "falcon_h1",
)  # fmt: skip
STATEFUL = ("mamba2", "qwen3_next", "jamba", "falcon_h1")
"""HF itself is wrong in chunks of some of them."""
ROUNDING = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Relative L2 distance of a row that rounding may make of two sound forwards."""
_HEAD = r"^(lm_head|embed_out|logits)$"
_CACHED = r"\.(0|{})\..*(cache|[qk]_rope|key|value|attention|attn|context|dense|proj)"
"""The operations around the first cache: of what a forward without a cache does not show."""
_ANYTHING = ".*"
_ATTEMPTS = 40


def draw(seed: int, index: int) -> Fault | None:
    """Return the fault of an index, the first of its attempts that changes something; None if none does.

    Kinds take turns. The id says which attempt it was: `drawn` makes it again from that.
    """
    for attempt in range(_ATTEMPTS):
        id = f"drawn/{seed}/{index}/{attempt}"
        fault = drawn(id)
        if fault is not None and (place := _place(fault)) is not None:
            return Fault(**{name: getattr(fault, name) for name in fault.__slots__} | {"tap": place})
    return None


def drawn(id: str) -> Fault | None:
    """Return the fault that an id describes, with any operation and cause; None if there is nothing to change."""
    _, seed, index, attempt = id.split("/")
    random = Random(f"{seed}/{index}/{attempt}")
    kind = list(KINDS)[int(index) % len(KINDS)]
    family, dtype = random.choice(FAMILIES), random.choice(tuple(ROUNDING))
    schedule = "plain" if family in STATEFUL else random.choice(("plain", "plain", "batched", "chunked:7"))
    try:
        made = KINDS[kind](build(family, seed=7), random)
    except (TypeError, ValueError, SyntaxError, OSError):  # no source, or nothing that compiles
        return None
    if made is None:
        return None
    setting = FaultConfig(model=family, dtype=dtype, schedule=schedule, max_new_tokens=NUM_NEW_TOKENS)
    return Fault(
        id=id, category=CATEGORIES[kind], summary=f"{kind}: {family}: {made[0]}.", inject=made[1], tap=_ANYTHING,
        row=ANY_ROW, cause=made[2] or _ANYTHING, engine=EngineKind.MODULE, setting=setting,
    )  # fmt: skip


def _place(fault: Fault) -> str | None:
    """Return a pattern of the first operation that is wrong; None if nothing changes beyond rounding, or HF raises."""
    sound = build(fault.setting.model, seed=7)
    faulty = copy.deepcopy(sound)
    try:
        if _largest_change(sound, fault) <= ROUNDING[fault.setting.dtype]:
            return None
        fault.inject(faulty)
        ids = torch.tensor([module_prompts(0)[0]])
        first = first_difference(trace(sound, ids), trace(faulty, ids))
    except Exception:  # an engine that raises is no silent fault
        return None
    return _CACHED.format(_first_layer_with_keys(sound, ids)) if first is None else pattern_of(first.path)


def pattern_of(path: str) -> str:
    """Return the pattern of the operations of a module: itself and what is in it; of attention its layer's taps."""
    path = path.removesuffix(".act_fn")
    parent, _, last = path.rpartition(".")
    if last == "activation_fn":
        return rf"^{re.escape(parent)}\.(act|{last})$"
    if not path:
        return _HEAD
    inside = rf"^{re.escape(path)}(\.|$)"
    if last in ATTENTION:
        return rf"{inside}|^{re.escape(parent)}\.(attention|q_rope|k_rope|k_cache|v_cache)$"
    return rf"{inside}|[qk]_rope" if "rotary" in last else inside


@torch.no_grad()
def _largest_change(sound: nn.Module, fault: Fault) -> float:
    """Return the largest relative difference of a row of the logits or caches, over a prefill and a few steps."""
    models = [copy.deepcopy(sound).to(getattr(torch, fault.setting.dtype)) for _ in range(2)]
    fault.inject(models[1])  # a copy of a changed model would go on to call the model that it was copied from
    ids = torch.tensor([module_prompts(0)[0]])
    states: list[dict[str, Any]] = [{}, {}]
    largest = 0.0
    for _ in range(4):
        outputs = [model(input_ids=ids, use_cache=True, **state) for model, state in zip(models, states, strict=True)]
        states = [caches_of(output) for output in outputs]
        largest = max(largest, _distance(*(output.logits for output in outputs)))
        ids = outputs[0].logits[:, -1:].argmax(-1)
    kept = [[x for x in _tensors(state) if x.is_floating_point()] for state in states]
    return max([largest, *(_distance(a, b) for a, b in zip(*kept, strict=True))])


@torch.no_grad()
def _first_layer_with_keys(model: nn.Module, ids: torch.Tensor) -> int:
    caches = caches_of(model(input_ids=ids, use_cache=True)).values()
    layers = (enumerate(getattr(cache, "layers", ())) for cache in caches)
    keyed = (at for cache in layers for at, layer in cache if isinstance(getattr(layer, "keys", None), torch.Tensor))
    return next(keyed, 0)


def _tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    layers = [layer for cache in state.values() for layer in getattr(cache, "layers", ())]
    held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return [value for value in held if isinstance(value, torch.Tensor)]


def _distance(expected: torch.Tensor, actual: torch.Tensor) -> float:
    if expected.shape != actual.shape or not bool(actual.isfinite().all()):
        return torch.inf
    expected, actual = expected.double(), actual.double()
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).max())
