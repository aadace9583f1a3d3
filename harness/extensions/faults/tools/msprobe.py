"""msprobe: dumps of two models at its level L0, and the verdict of its comparison on each output of a module."""

import csv
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.fault import EngineKind
from harness.extensions.faults.subject import ToolSubject
from harness.extensions.faults.tools import driving

_DECODE = 2
"""Steps of decode that are compared: a comparison takes a second."""


class _Msprobe:
    names = ("msprobe",)
    kinds = frozenset({EngineKind.MODULE})
    rules = frozenset[str]()

    def __init__(self) -> None:
        self._debugger: Any = None
        self._num_steps = 0

    def check(self, subject: ToolSubject) -> Mapping[str, ToolAnswer]:
        """See `Tool.check`."""
        for forward in driving.forwards(subject, driving.sound_model(subject)):
            request, position = next(row for row in forward.rows if row is not None)
            if position >= len(subject.prompts[request]) + _DECODE:
                for fed in (forward.expected, forward.actual):
                    forward.run(fed)
                continue
            wrong = next(self._wrong(forward), None)
            if wrong is not None:
                return {"msprobe": ToolAnswer(is_sound=False, operation=wrong)}
        return {"msprobe": ToolAnswer(is_sound=True)}

    def _wrong(self, forward: driving.DrivenForward) -> Iterator[str]:
        """Yield the paths of modules whose output does not pass, in the order of the run."""
        from msprobe.pytorch.compare.pt_compare import pt_compare

        bench, engine = (self._dumped(forward, fed) for fed in (forward.expected, forward.actual))
        paths = {
            "npu_path": engine / "dump.json",
            "bench_path": bench / "dump.json",
            "stack_path": engine / "stack.json",
        }
        pt_compare({name: str(path) for name, path in paths.items()}, str(engine), fuzzy_match=False)
        (table,) = engine.glob("compare_result_*.csv")
        with table.open(encoding="utf-8-sig", newline="") as rows:
            for row in csv.DictReader(rows):
                name = row["NPU Name"]
                if ".output." in name and row["Result"] != "pass":
                    yield ".".join(name.partition(".forward.")[0].split(".")[1:-1])
        shutil.rmtree(bench.parent)
        shutil.rmtree(engine.parent)

    def _dumped(self, forward: driving.DrivenForward, fed: driving.Fed) -> Path:
        """Return the folder of what msprobe kept of one forward."""
        from msprobe.pytorch import PrecisionDebugger

        if self._debugger is None:  # there is one in a process
            self._folder = Path(mkdtemp(prefix="harness-"))
            what = {"scope": [], "list": [], "data_mode": ["all"]}
            path = str(self._folder / "dump")
            settings = {"task": "tensor", "tensor": what, "dump_path": path, "rank": [], "step": [], "level": "L0"}
            (self._folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
            self._debugger = PrecisionDebugger(config_path=str(self._folder / "config.json"))
        self._debugger.start(model=fed.model)
        forward.run(fed)
        self._debugger.stop()
        self._debugger.step()
        (folder,) = (self._folder / "dump" / f"step{self._num_steps}").iterdir()
        self._num_steps += 1
        return folder


TOOL = _Msprobe()
