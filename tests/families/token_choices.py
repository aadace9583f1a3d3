"""Choices among the tokens so far (the indexers of sparse attention), sound and with faults.

python -m tests.families.token_choices [--dtypes float32,bfloat16] [--no-faults | --no-sound] [FAMILY ...]

The engine is HF through its own cache. Faults are planted in the indexers of its copy of the model.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch.overrides import TorchFunctionMode

from harness.errors import HarnessError
from harness.oracle.decode import HFDecoder
from harness.oracle.model import HFModel
from harness.results.check import Outcome

from .images import shown
from .states import SCHEDULES, Subject, subject

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text", "hy_v4")
SITE = "indexer.topk"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing done wrongly by every indexer."""

    name: str
    schedule: str = "plain"
    settings: Callable[[Any], None] = lambda _indexer: None
    """Changes an indexer."""
    choose: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Scores to choose by in the place of the right ones."""
    says: Sequence[str] = ()
    """Words of which a right name has one; none where the choice alone cannot tell."""


def one_fewer(indexer: Any) -> None:
    indexer.index_topk -= 1


def other_heads(indexer: Any) -> None:
    weight = indexer.weights_proj.weight
    weight.data = weight.data.roll(1, 0)


def not_scaled_keys(indexer: Any) -> None:
    indexer.k_norm.weight.data = torch.ones_like(indexer.k_norm.weight)


def with_later(scores: torch.Tensor) -> torch.Tensor:
    """Let the two latest tokens of the forward be chosen by every row, seen or not."""
    scores = scores.clone()
    scores[..., -2:] = 1e4
    return scores


def lowest(scores: torch.Tensor) -> torch.Tensor:
    return (-scores).masked_fill(scores.isinf(), -torch.inf)


def latest(scores: torch.Tensor) -> torch.Tensor:
    places = torch.arange(scores.shape[-1], dtype=scores.dtype).expand_as(scores)
    return places.masked_fill(scores.isinf(), -torch.inf)


def one_late(scores: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(scores[..., :-1], (1, 0), value=-torch.inf)


FAULTS = (
    Fault(name="one token fewer", settings=one_fewer, says=("15 tokens in the place of 16",)),
    Fault(name="tokens after the row", choose=with_later),
    Fault(name="weights of another head", settings=other_heads, says=("in another order",)),
    Fault(name="keys not scaled by their norm", settings=not_scaled_keys, says=("weight is not applied",)),
    Fault(name="the lowest scores", choose=lowest),
    Fault(name="the latest tokens", choose=latest, says=("the latest tokens",)),
    Fault(name="positions one late", choose=one_late),
    Fault(name="positions one late in chunks", schedule="chunked", choose=one_late),
)


class _Topk(TorchFunctionMode):
    """Lets indexers choose otherwise; a router's choice has other dimensions."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor], num: int) -> None:
        super().__init__()
        self._choose, self._num = choose, num

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk and args[0].dim() == 3 and args[1] == min(self._num, args[0].shape[-1]):
            args = (self._choose(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def decoder_with(fault: Fault) -> type[HFDecoder]:
    """Return a decoder that puts the fault into the model that it decodes with."""

    class Faulty(HFDecoder):
        def __init__(self, hf: HFModel) -> None:
            super().__init__(hf)
            self._indexers = [
                module for module in hf.model.modules() if hasattr(module, "index_topk") and hasattr(module, "wk")
            ]
            self._num = self._indexers[0].index_topk
            if not getattr(hf.model, "is_faulty", False):
                hf.model.is_faulty = True
                for indexer in self._indexers:
                    fault.settings(indexer)

        def feed(self, ids: Sequence[Sequence[int]], **options: Any) -> torch.Tensor:
            if fault.choose is None:
                return super().feed(ids, **options)
            handles = [item.register_forward_pre_hook(self._begin) for item in self._indexers]
            handles += [item.register_forward_hook(self._end) for item in self._indexers]
            try:
                return super().feed(ids, **options)
            finally:
                for handle in handles:
                    handle.remove()

        def _begin(self, *_args: Any) -> None:
            assert fault.choose is not None
            self._mode = _Topk(fault.choose, self._num)
            self._mode.__enter__()

        def _end(self, *_args: Any) -> None:
            self._mode.__exit__(None, None, None)

    return Faulty


def sound_rows(opened: Subject, family: str, dtype: str) -> Iterator[list[object]]:
    """Yield a row for each schedule of a sound run."""
    for schedule in SCHEDULES:
        try:
            run = opened.check(schedule, explains=False)
        except HarnessError as error:
            yield [family, dtype, schedule, "refused", "", "", " ".join(error.what.split())[:90]]
            continue
        taps = [tap for tap in run.taps if tap.name.endswith(SITE)]
        worst = max((tap.local_bound_share_max or 0.0 for tap in taps), default=0.0)
        first = "" if run.first_divergence is None else run.first_divergence.tap
        yield [family, dtype, schedule, str(run.outcome), sum(tap.num_rows for tap in taps), f"{worst:.2f}", first]


def fault_row(opened: Subject, family: str, dtype: str, fault: Fault) -> list[object]:
    """Plant a fault and say what was found of it."""
    run = opened.check(fault.schedule, decoder_with(fault))
    first = run.first_divergence
    explanation = None if first is None else first.explanation
    said = explanation.cause if explanation is not None and explanation.is_cause else ""
    is_right = any(word in said for word in fault.says)
    word = "named" if is_right else "wrong name" if said else "not named"
    tap = "" if first is None else first.tap
    return [family, dtype, fault.name, "yes" if run.outcome is Outcome.MISMATCH else "no", tap, word, said]


def main(arguments: Sequence[str]) -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("families", nargs="*", default=[])
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--no-sound", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sound, faulty = list[list[object]](), list[list[object]]()
    for family in options.families or FAMILIES:
        for dtype in options.dtypes.split(","):
            with subject(family, dtype) as opened:
                if not options.no_sound:
                    sound += [shown(row) for row in sound_rows(opened, family, dtype)]
                if not options.no_faults:
                    faulty += [shown(fault_row(opened, family, dtype, fault)) for fault in FAULTS]
    heads = ["family", "dtype", "schedule", "result", "choices judged", "largest share of a bound", "first wrong"]
    sys.stdout.write(tabulate(sound, heads, tablefmt="pipe", disable_numparse=True) + "\n\n")
    heads = ["family", "dtype", "fault", "detected", "first at", "first cause", "said"]
    sys.stdout.write(tabulate(faulty, heads, tablefmt="pipe", disable_numparse=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
