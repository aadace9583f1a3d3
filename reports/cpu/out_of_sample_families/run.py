"""Run a list: `python reports/cpu/out_of_sample_families/run.py faults|variants OUT.jsonl [part of an id ...]`, from the repository's root."""

import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

from faults import FAULTS, Fault
from step_engine import StepEngine
from transformers import AutoModelForCausalLM
from variants import VARIANTS

import harness
from tests.families.lively import make_lively
from tests.families.quiet import quiet
from tests.families.tiny_config import tiny_config
from tests.families.zoo import load

DRAWN = torch.Generator().manual_seed(20261123)
PROMPTS = [torch.randint(3, 250, (size,), generator=DRAWN).tolist() for size in (40, 23)]


def saved(family: str, settings: dict, folder: Path) -> Path:
    """Write a tiny checkpoint with lively weights, once for each family and settings."""
    path = folder / f"{family}-{abs(hash(str(settings)))}"
    if not path.exists():
        torch.manual_seed(7)
        config = tiny_config(family)
        if settings:
            config = type(config)(**config.to_diff_dict() | settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        make_lively(model, 7)
        model.save_pretrained(path)
    return path


def checked(entry, folder: Path) -> dict:
    dtype = getattr(torch, entry.dtype)
    path = saved(entry.family, dict(getattr(entry, "settings", {})), folder)
    kind, _, which = entry.engine.partition(":")
    if kind == "hf":
        engine = load(path, dtype=dtype)
        if entry.plant is not None:
            entry.plant(engine)
    else:
        engine = StepEngine(path, dtype, **({"wrong": which} if kind == "own" else {"style": which}))
        engine.every_row = entry.schedule in ("speculative",)
    report = harness.check(engine, model=str(path), prompts=PROMPTS, max_new_tokens=8, schedules=[entry.schedule])
    first = report.first_divergence
    said = {"ok": report.is_ok, "text": report.text()}
    if first is not None:
        said |= {"tap": first.tap, "request": first.request, "position": first.position, "code": str(first.code.value)}
        if first.explanation is not None:
            said |= {
                "cause": first.explanation.cause,
                "detail": first.explanation.detail,
                "is_cause": first.explanation.is_cause,
            }
    return said


def judged(fault: Fault, said: dict) -> dict:
    """Say what of the expectation came true; `named` is right, none, or another (to be judged by a reader)."""
    if "error" in said:
        return {"result": "crash"}
    if said["ok"]:
        return {"result": "missed"}
    named = "none"
    if said.get("is_cause"):
        words = f"{said['cause']} {said.get('detail', '')}"
        named = "right" if fault.says is not None and re.search(fault.says, words, re.IGNORECASE) else "another"
    is_place = "tap" in said and re.search(fault.where, said["tap"]) is not None
    is_row = (
        "tap" in said
        and (fault.row is None or said["position"] == fault.row)
        and (fault.request is None or said["request"] == fault.request)
    )
    return {"result": "found", "operation": is_place, "row": is_row, "named": named}


def main() -> None:
    which, out, *parts = sys.argv[1:]
    entries = FAULTS if which == "faults" else VARIANTS
    entries = [entry for entry in entries if not parts or any(part in entry.id for part in parts)]
    folder = Path(tempfile.mkdtemp(prefix="out-of-sample-"))
    try:
        with open(out, "a") as lines, quiet():
            for entry in entries:
                begin = time.perf_counter()
                torch.set_num_threads(getattr(entry, "threads", 1))
                try:
                    said = checked(entry, folder)
                except Exception as error:  # a crash is a result
                    causes = " <- ".join(f"{type(cause).__name__}: {cause}" for cause in chain(error))
                    said = {"error": causes[:3000], "code": getattr(error, "code", None) and str(error.code)}
                line = {
                    "id": entry.id,
                    **(judged(entry, said) if which == "faults" else {}),
                    **said,
                    "seconds": round(time.perf_counter() - begin, 2),
                }
                lines.write(json.dumps(line, default=str) + "\n")
                lines.flush()
                with contextlib.suppress(BrokenPipeError):
                    print(
                        entry.id,
                        line.get("result", line.get("ok")),
                        line.get("operation"),
                        line.get("row"),
                        line.get("named"),
                        said.get("error", "")[:200],
                        flush=True,
                    )
    finally:
        shutil.rmtree(folder)


def chain(error: BaseException | None) -> list[BaseException]:
    errors = []
    while error is not None:
        errors.append(error)
        error = error.__cause__
    return errors


if __name__ == "__main__":
    main()
