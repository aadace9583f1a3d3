"""What the statistics below one rounding reach on sound engines, under prompts that no constant was chosen from.

    python -m tests.calibrations.systematic_floors [--seeds 1000 1001] [--out reports/cpu/systematic.md]

Every benign variant of the scoreboard is checked with fresh prompts; of every effect that was looked for the statistic
and the size are kept, whether it was significant or not.
"""

import argparse
import datetime
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

from tabulate import tabulate

from harness.base.environment import describe_machine
from harness.extensions.faults.reference.variants import variants
from harness.judge.compare.systematic import THRESHOLD, Effects
from harness.results.check import Effect
from tests.fault_trial import try_entry

ROOT = Path(__file__).parents[2]
Group = tuple[str, str, str]
"""Kind of operation, dtype, kind of effect."""


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000])
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "cpu" / "systematic.md")
    options = parser.parse_args()
    effects_by_group: defaultdict[Group, list[Effect]] = defaultdict(list)
    original = Effects.strongest

    def strongest(effects: Effects) -> Effect | None:
        for effect in effects.all():
            group = str(effects.kind), str(effects.dtype).removeprefix("torch."), effect.kind
            effects_by_group[group].append(effect)
        return original(effects)

    num_runs, alarms = 0, []
    with patch.object(Effects, "strongest", strongest):
        for seed in options.seeds:
            for variant in variants():
                num_runs += 1
                if try_entry(variant, seed=seed).is_alarm:
                    alarms.append(f"{variant.id}, seed {seed}")
    options.out.write_text(report(effects_by_group, num_runs, alarms, options.seeds), encoding="utf-8")


def report(effects_by_group: dict[Group, list[Effect]], num_runs: int, alarms: list[str], seeds: list[int]) -> str:
    """Return the report."""
    rows = []
    for (kind, dtype, what), effects in sorted(effects_by_group.items()):
        statistics = sorted(abs(effect.statistic) for effect in effects)
        above = [abs(effect.roundings) for effect in effects if abs(effect.statistic) >= THRESHOLD]
        largest = f"{max(above):.2g}" if above else "-"
        p99 = statistics[int(0.99 * (len(statistics) - 1))]
        rows.append(
            [kind, dtype, what, f"{len(effects):,}", f"{p99:.1f}", f"{statistics[-1]:.1f}", len(above), largest]
        )
    machine = describe_machine("cpu")
    header = ["operation", "dtype", "effect", "looked at", "99 %", "largest", f"beyond {THRESHOLD:g}", "their size"]
    return "\n\n".join([
        "# Statistics below one rounding, on sound engines",
        f"`python -m tests.calibrations.systematic_floors --seeds {' '.join(map(str, seeds))}`, "
        f"{datetime.date.today()}, "
        f"{machine.hardware}; {machine.software}.",
        f"{num_runs} checks of benign variants, with prompts that no constant was chosen from: {len(alarms)} alarms"
        f"{': ' + '; '.join(alarms) if alarms else ''}.",
        f"Statistics are absolute. An effect alarms if its statistic is at least {THRESHOLD:g} and its size above "
        "the floor of its kind (`harness/judge/compare/systematic.py`). "
        "The last column: largest size, in roundings, of those beyond the threshold.",
        tabulate(rows, header, tablefmt="github", disable_numparse=True),
    ]) + "\n"  # fmt: skip


if __name__ == "__main__":
    main()
