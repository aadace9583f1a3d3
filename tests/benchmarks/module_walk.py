"""Count how a check goes through the modules of the harness: python tests/benchmarks/module_walk.py

Every call of a function of harness/ is noted by sys.setprofile (generators, comprehensions and lambdas are left out). A
*stay* is a run of calls into one module; a *return* is a stay in a module that was left before.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import torch

from harness.formats.case import load_case
from harness.judge.jobs.check import run_check
from harness.judge.jobs.opened import describe_run
from harness.oracle.lora import load_adapted
from harness.oracle.make_golden import cached_golden
from harness.plan import Plan, plan_case

ROOT = Path(__file__).parents[2]
ABOUT_CHECKPOINTS = ("checkpoint/", "inspect/", "safetensors_header", "plan", "oracle/model", "oracle/lora",
                     "oracle/make_golden", "jobs/check", "case", "schedule", "files")  # fmt: skip


def planned() -> Plan:
    return plan_case(load_case(ROOT / "cases" / "default.toml"))


def opened() -> None:
    plan = planned()
    hf = load_adapted(plan.checkpoint, dtype=getattr(torch, plan.case.dtype), device=plan.case.device)
    cached_golden(hf, plan.prompts)
    describe_run(plan, plan.schedules[0], [], Path("nowhere"))


def modules_entered(work: Callable[[], object]) -> list[str]:
    work()  # what is cached on disk, and imported, is there
    modules: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and not frame.f_code.co_name.startswith("<") and path.is_relative_to(ROOT / "harness"):
            modules.append(str(path.relative_to(ROOT / "harness")))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return modules


def tell(name: str, entered: Sequence[str]) -> None:
    stays = [module for at, module in enumerate(entered) if at == 0 or entered[at - 1] != module]
    num_modules = len(set(stays))
    print(
        f"{name}: {num_modules} modules, {len(stays)} stays, {len(stays) - num_modules} returns, {len(entered)} calls"
    )


def main() -> None:
    tell("plan", modules_entered(planned))
    entered = modules_entered(opened)
    tell("plan, oracle, golden from the cache, description of a run", entered)
    tell("of these in modules about checkpoints", [item for item in entered if item.startswith(ABOUT_CHECKPOINTS)])
    tell("the same by folder", [item.split("/")[0] for item in entered])
    for name, work, times in (("opened", opened, 15), ("checked", lambda: run_check(planned()), 5)):
        seconds = []
        for _ in range(times):
            begin = time.process_time()
            work()
            seconds.append(time.process_time() - begin)
        print(f"{name}: CPU {min(seconds):.3f} to {max(seconds):.3f} s, median {sorted(seconds)[times // 2]:.3f} s")


if __name__ == "__main__":
    main()
