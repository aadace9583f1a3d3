"""A golden as a plan has it: from the cache, or written to a folder."""

from contextlib import nullcontext
from pathlib import Path

from harness.base.progress import Progress
from harness.judge.jobs.model import planned_model
from harness.judge.jobs.output_folder import new_output_dir
from harness.oracle.golden import Golden
from harness.oracle.make_golden import cached_golden, make_golden
from harness.plan import Plan


def run_golden(
    plan: Plan, *, out: Path | None = None, progress: Progress | None = None, keeps_values: bool = True
) -> Golden:
    """Return what HF computes for a plan's prompts.

    Args:
        plan: model, prompts, dtype, device and truth.
        out: folder, new or empty, that the golden is written to; None for the cache, where it may be already.
        progress: told what is being done.
        keeps_values: whether the golden is to hold all values; without, one from the cache may hold sketches of them.

    Raises:
        HarnessError: the input cannot be used, or `out` cannot be written.
    """
    with nullcontext() if out is None else new_output_dir(out):
        hf = planned_model(plan)
        if out is None:
            return cached_golden(hf, plan.prompts, truth=plan.case.truth, progress=progress, keeps_values=keeps_values)
        return make_golden(hf, plan.prompts, out, truth=plan.case.truth, progress=progress)
