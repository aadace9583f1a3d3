"""A second list of faults in architectures that no explanation was written for; see naming.py.

python -m tests.families.naming_second [--dtype float32] ARCHITECTURE ...

States that are forgotten or never updated in decode, and five faults of weights and functions. They were written down
before any of them was run.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from harness.extensions.faults.zoo.models import build
from harness.extensions.faults.zoo.quiet import quiet

from .check import subject
from .faults.attention import num_heads
from .faults.plan import from_the_middle, set_parameter
from .naming import counted, named

FORGOTTEN, FROZEN = r"state is not carried from one step", r"state is not updated in decode"


@dataclass(frozen=True, kw_only=True)
class Second:
    """One fault and what may be said of it."""

    name: str
    truth: str
    inject: Callable[[nn.Module], None]


def modules(model: nn.Module, condition: Callable[[nn.Module], Any]) -> list[nn.Module]:
    return from_the_middle([module for module in model.modules() if condition(module)])


def _cache_name(mixer: nn.Module) -> str | None:
    taken = inspect.signature(mixer.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in taken), None)


def has_states(module: nn.Module) -> bool:
    """Tell a mixer that is handed its state in a cache, by the innermost module that takes it."""
    return _cache_name(module) is not None and hasattr(module, "layer_idx") and hasattr(module, "conv1d")


def state(which: str, is_frozen: bool) -> Callable[[nn.Module], None]:
    """Empty a state before every step of one row, or put it back after the step."""

    def inject(model: nn.Module) -> None:
        mixer: Any = modules(model, has_states)[0]
        forward, name = mixer.forward, _cache_name(mixer)

        def wrong(hidden_states: torch.Tensor, **rest: Any) -> Any:
            cache = rest.get(name)
            get = None if cache is None else getattr(cache, f"get_{which}_state")
            held = None if get is None or hidden_states.shape[1] > 1 else get(mixer.layer_idx, state_idx=0)
            if held is None:
                return forward(hidden_states, **rest)
            before = held.clone()
            if not is_frozen:
                held.zero_()
            output = forward(hidden_states, **rest)
            if is_frozen:
                get(mixer.layer_idx, state_idx=0).copy_(before)
            return output

        mixer.forward = wrong

    return inject


def v_heads(model: nn.Module) -> None:
    """The heads of v are in the reverse order."""
    module: Any = modules(model, lambda module: num_kv_heads(module) > 1)[0]
    for name, parameter in list(module.v_proj.named_parameters()):
        set_parameter(module.v_proj, name, parameter.unflatten(0, (num_kv_heads(module), -1)).flip(0).flatten(0, 1))


def num_kv_heads(module: nn.Module) -> int:
    projection = getattr(module, "v_proj", None)
    if not num_heads(module) or not isinstance(projection, nn.Linear):
        return 0
    return projection.out_features // int(module.head_dim)  # type: ignore[arg-type]


def row_zero(model: nn.Module) -> None:
    module: Any = modules(
        model, lambda module: isinstance(module, nn.Linear) and module.in_features != module.out_features
    )[0]
    changed = module.weight.detach().clone()
    changed[5] = 0
    set_parameter(module, "weight", changed)


def weights_louder(model: nn.Module) -> None:
    module: Any = modules(model, lambda module: isinstance(module, nn.Linear))[0]
    set_parameter(module, "weight", module.weight * 1.03)


def one_norm_weight(model: nn.Module) -> None:
    module: Any = modules(model, is_norm)[0]
    changed = module.weight.detach().clone()
    changed[3] = 1.5 * changed[3] + 0.5
    set_parameter(module, "weight", changed)


def is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "Norm" in type(module).__name__ and isinstance(weight, torch.Tensor) and weight.dim() == 1


def acts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "act_fn", None), nn.Module) and hasattr(module, "up_proj")


def activation(model: nn.Module) -> None:
    modules(model, acts)[0].act_fn = nn.ReLU()


SECOND = (
    Second(name="conv_state_forgotten", truth=FORGOTTEN, inject=state("conv", False)),
    Second(name="conv_state_frozen", truth=FROZEN, inject=state("conv", True)),
    Second(name="recurrent_state_forgotten", truth=FORGOTTEN, inject=state("recurrent", False)),
    Second(name="recurrent_state_frozen", truth=FROZEN, inject=state("recurrent", True)),
    Second(name="v_heads_reversed", truth="another order|wrong order", inject=v_heads),
    Second(name="row_zero", truth="outputs are zero", inject=row_zero),
    Second(name="weights_louder", truth="gain|scaled", inject=weights_louder),
    Second(name="one_norm_weight", truth="weight of the norm is another", inject=one_norm_weight),
    Second(name="activation_relu", truth="ReLU", inject=activation),
)


def applicable(name: str) -> list[Second]:
    """Return the faults that have a place in an architecture."""
    faults = []
    for fault in SECOND:
        try:
            fault.inject(build(name))
        except IndexError:  # it has no such module
            continue
        faults.append(fault)
    return faults


def trials(name: str, dtype: str) -> Iterator[list[str]]:
    """Yield a line for every fault that applies to an architecture and is found."""
    with quiet():
        faults = applicable(name)
    with subject(name, dtype) as opened:
        for fault in faults:
            tap, explanation = named(opened, fault)  # type: ignore[arg-type]
            said = f"{explanation.cause}; {explanation.detail}" if explanation else ""
            is_true = bool(re.search(fault.truth, said))
            is_asserted = explanation is not None and explanation.is_cause
            verdict = "named" if is_asserted and is_true else "WRONG" if is_asserted else "unnamed"
            yield [name, dtype, fault.name, tap, "not detected" if tap == "nowhere" else verdict, said]


def main() -> None:
    """Print what was said of every fault, and how often it was true."""
    parser = argparse.ArgumentParser(prog="python -m tests.families.naming_second")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    counts = counted(trials, options.names, options.dtype)
    words = ("named", "unnamed", "WRONG", "not detected")
    table = [[fault.name, *(counts[fault.name, word] for word in words)] for fault in SECOND]
    sys.stdout.write(tabulate(table, ["fault", *words], tablefmt="github") + "\n")


if __name__ == "__main__":
    main()
