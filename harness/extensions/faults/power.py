"""The smallest error that a tool finds: of an eps, theta, softmax scale, one expert, one slot of the cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from harness.base.progress import Progress
from harness.extensions.faults.benchmark import Questions
from harness.extensions.faults.fault import ANY_ROW, Category, EngineKind, Fault, FaultConfig, Variant
from harness.extensions.faults.modules.changes import Plant, cache, frequencies, weight
from harness.extensions.faults.modules.declaring import NUM_NEW_TOKENS
from harness.extensions.faults.modules.sound_attention import implementation
from harness.extensions.faults.modules.sound_modules import at_modules, halves, is_linear

DTYPES = ("float32", "bfloat16", "float16")
SIZES = tuple(10 ** (-step / 2) for step in range(15))
"""From 1 down to 1e-7, two in a decade."""
SOUND: Mapping[str, Plant | None] = {
    "as-it-is": None,
    "eager-attention": implementation("eager"),
    "products-in-halves": at_modules(is_linear, halves),
}
"""Sound engines in which none of the quantities is off."""
_FAMILY, _LAYER = "qwen3_moe", "model.layers.0."
_SLOT, _EXPERT = 5, 1


def _eps(size: float) -> Plant:
    def plant(model: nn.Module) -> None:
        norm: Any = model.get_submodule(f"{_LAYER}input_layernorm")
        norm.variance_epsilon += size

    return plant


def _scale(size: float) -> Plant:
    def plant(model: nn.Module) -> None:
        attention: Any = model.get_submodule(f"{_LAYER}self_attn")
        attention.scaling *= 1 + size

    return plant


def _theta(size: float) -> Plant:
    def slower(inv_freq: torch.Tensor) -> torch.Tensor:
        return inv_freq * (1 + size) ** -(torch.arange(len(inv_freq)) / len(inv_freq))

    return frequencies(slower)


def _expert(size: float) -> Plant:
    def scaled(matrices: torch.Tensor) -> torch.Tensor:
        matrices[_EXPERT] *= 1 + size
        return matrices

    return weight(f"{_LAYER}mlp.experts.down_proj", scaled)


def _slot(size: float) -> Plant:
    def update(inner: Callable[..., Any], k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if v.shape[2] > _SLOT:
            v = v.clone()
            v[:, :, _SLOT] *= 1 + size
        return inner(k, v, *rest, **named)

    return cache(update=update)


QUANTITIES: Mapping[str, Callable[[float], Plant]] = {
    "eps": _eps, "theta": _theta, "softmax-scale": _scale, "one-expert": _expert, "one-slot": _slot,
}  # fmt: skip


def power_entry(id: str) -> Fault | Variant:
    """Return the fault of an id, `power/eps/float32/4`, or the sound engine `power/sound/float32/eager-attention`."""
    _, quantity, dtype, step = id.split("/")
    setting = FaultConfig(model=_FAMILY, dtype=dtype, schedule="plain", max_new_tokens=NUM_NEW_TOKENS)
    if step in SOUND:
        return Variant(id=id, summary=step, setting=setting, engine=EngineKind.MODULE, inject=SOUND[step])
    size = SIZES[int(step)]
    return Fault(
        id=id, category=Category.NUMBERS, summary=f"{quantity} off by {size:.1e}.", inject=QUANTITIES[quantity](size),
        tap=".*", row=ANY_ROW, cause=".*", engine=EngineKind.MODULE, setting=setting,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestError:
    """The smallest error of one quantity in one dtype that each tool finds."""

    quantity: str
    dtype: str
    smallest: Mapping[str, float | None]
    """By tool; None if it finds none of them."""
    alarms: Sequence[str]
    """Tools that call a sound engine of this dtype wrong."""


def measure(
    tools: Mapping[str, Sequence[str]], questions: Questions, progress: Progress | None = None
) -> list[SmallestError]:
    """Search the smallest size of each quantity in each dtype by bisection.

    Args:
        tools: adapters, and the names of the tools that each answers for.
        questions: what asks them.
        progress: called with the stage, the finished part and the total.
    """
    report, powers = progress or (lambda _label, _done, _total: None), []
    cells = [(quantity, dtype) for quantity in QUANTITIES for dtype in DTYPES]
    for done, (quantity, dtype) in enumerate(cells):
        report(f"power: {quantity} in {dtype}", done, len(cells))
        smallest: dict[str, float | None] = {}
        alarms: list[str] = []

        def is_detected(adapter: str, name: str, step: str, at: str = f"power/{quantity}/{dtype}") -> bool:
            answer = questions.ask(adapter, f"{at}/{step}").answers.get(name)
            return answer is not None and not answer.is_sound

        for adapter, names in tools.items():
            for name in names:
                alarms += (
                    [name] if any(is_detected(adapter, name, kind, f"power/sound/{dtype}") for kind in SOUND) else []
                )
                low, high = -1, len(SIZES)  # the last size that is found, and the first that is not
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if is_detected(adapter, name, str(middle)) else (low, middle)
                smallest[name] = SIZES[low] if low >= 0 else None
        powers.append(SmallestError(quantity=quantity, dtype=dtype, smallest=smallest, alarms=alarms))
    return powers


def as_json(powers: Sequence[SmallestError]) -> dict[str, Any]:
    """Return the smallest sizes under the keys of docs/faults.md."""
    return {"schema_version": 1, "power": [asdict(power) for power in powers]}


def as_table(powers: Sequence[SmallestError], *, tablefmt: str = "github") -> str:
    """Return a table of the smallest sizes: tools in columns, in brackets where a sound engine alarms."""
    names = list(powers[0].smallest)
    rows = [[power.quantity, power.dtype, *(_shown(power, name) for name in names)] for power in powers]
    return tabulate(rows, headers=["off", "dtype", *names], tablefmt=tablefmt, disable_numparse=True) + "\n"


def _shown(power: SmallestError, name: str) -> str:
    size = power.smallest[name]
    text = "-" if size is None else f"{size:.1e}"
    return f"({text})" if name in power.alarms else text
