"""Print what HF does with each architecture of the zoo, and where each fault shows.

python -m tests.families.table [ARCHITECTURE ...]
"""

import sys
from collections import defaultdict
from statistics import median

import torch
from tabulate import tabulate
from transformers import PreTrainedModel

from harness.extensions.faults.placed import FAULTS, PlacedFault, applicable
from harness.extensions.faults.zoo.divergence import ModuleEvent, ValueDifference, first_difference, trace
from harness.extensions.faults.zoo.models import build, tokens

from .architectures import architectures, excluded
from .behaviour import HF_FAILS, Behaviour, behaviour

Shown = dict[str, list[tuple[PlacedFault, ValueDifference | None]]]


def main(names: list[str]) -> None:
    torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings
    behaviours: dict[str, tuple[PreTrainedModel, Behaviour]] = {}
    shown: Shown = {}
    for name in names or architectures():
        model = build(name)
        behaviours[name] = model, behaviour(model)
        events = trace(model, tokens())
        shown[name] = [(fault, where_shown(events, name, fault)) for fault in applicable(model)]
    sys.stdout.write(
        "\n\n".join([table_of_models(behaviours, shown), table_of_faults(shown), table_of_excluded()]) + "\n"
    )


def where_shown(sound: list[ModuleEvent], name: str, fault: PlacedFault) -> ValueDifference | None:
    faulty = build(name)
    fault.inject(faulty)
    return first_difference(sound, trace(faulty, tokens()))


def table_of_models(behaviours: dict[str, tuple[PreTrainedModel, Behaviour]], shown: Shown) -> str:
    rows = []
    for name, (model, observed) in behaviours.items():
        known = HF_FAILS.get(name, {})
        decode = f"{observed.decode:.0e}" if isinstance(observed.decode, float) else "fails"
        problems = "; ".join(f"{problem}: {known.get(problem, '?')}" for problem in sorted(observed.problems()))
        thousands = model.num_parameters() / 1e3
        rows.append([name, thousands, observed.logits_std, observed.influence, decode, len(shown[name]), problems])
    headers = ["architecture", "thousand parameters", "logits std", "influence", "decode", "faults", "HF fails at"]
    formats = ("", ".0f", ".2f", ".2f", "", "", "")
    return tabulate(rows, headers, tablefmt="github", floatfmt=formats)


def table_of_faults(shown: Shown) -> str:
    sizes: dict[str, list[float]] = defaultdict(list)
    hits: dict[str, int] = defaultdict(int)
    for trials in shown.values():
        for fault, difference in trials:
            sizes[fault.name].append(difference.size if difference else 0.0)
            hits[fault.name] += difference is not None and difference.path in fault.sites
    rows = [
        [name, FAULTS[name].__doc__, len(sizes[name]), hits[name], min(sizes[name]), median(sizes[name])]
        for name in FAULTS
        if sizes[name]
    ]
    headers = ["fault", "what is wrong", "architectures", "shows where it is named", "smallest", "median"]
    return tabulate(rows, headers, tablefmt="github", floatfmt=".1e")


def table_of_excluded() -> str:
    return tabulate(list(excluded().items()), ["not in the zoo", "why"], tablefmt="github")


if __name__ == "__main__":
    main(sys.argv[1:])
