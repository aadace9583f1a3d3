"""Ask tools of engines with mistakes in them and of sound ones: each tool in its own process, a line for each answer.

Answers are kept as they come, so that a run that was interrupted goes on where it ended.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from harness.base.files import writing
from harness.base.progress import Progress
from harness.engines.process import EngineProcess
from harness.errors import Code, HarnessError
from harness.extensions.faults.answer import NO_ANSWER, ToolAnswer
from harness.extensions.faults.fault import Fault, Variant

ANSWERS = "answers.jsonl"
_Entry = TypeVar("_Entry", Fault, Variant)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTool:
    """What came of one question to a tool, or to several that share a process."""

    tool: str
    id: str
    """Of the fault or variant."""
    answers: dict[str, ToolAnswer]
    """By the names of the tools; empty if there is a problem."""
    distances: dict[str, int | None]
    """By name: how many operations a wrong answer is away from the true one."""
    problem: str
    """Why there is no answer: not installed, too slow, ended, raised, or takes no such engine."""
    notes: tuple[str, ...]
    """What the tool did besides: wrote to standard output, changed the model."""
    seconds: float
    """Of the CPU."""
    is_refused: bool = False
    """Whether the tool takes no such engine."""


class ToolProcess(EngineProcess):
    """The process of a tool."""

    module = "harness.extensions.faults.worker"


def sampled(entries: Sequence[_Entry], number: int | None, seed: int) -> list[_Entry]:
    """Return so many of the entries, in their order; all of them by default.

    Larger samples hold the smaller ones, and entries that are added to a list leave the order of the others.
    """
    if number is None or number >= len(entries):
        return list(entries)
    drawn = sorted(entries, key=lambda entry: sha256(f"{seed}/{entry.id}".encode()).digest())
    chosen = {entry.id for entry in drawn[:number]}
    return [entry for entry in entries if entry.id in chosen]


class Questions:
    """Questions to tools: a process for each tool, started when it is first asked, and the answers so far."""

    def __init__(self, *, seed: int = 0, device: str = "cpu", limit_s: float = 120.0, out: Path | None = None) -> None:
        """Begin.

        Args:
            seed: of the prompts.
            device: of the reference engine.
            limit_s: longest time for an answer; then the process is ended, and a new one goes on.
            out: folder of earlier answers, to which new ones are added.
        """
        self._seed, self._device, self._limit_s, self._out = seed, device, limit_s, out
        self._kept = _kept(out, seed, device)
        self._processes: dict[str, ToolProcess] = {}

    def __enter__(self) -> "Questions":
        return self

    def __exit__(self, *_: object) -> None:
        for tool in list(self._processes):
            self.close(tool)

    def close(self, tool: str) -> None:
        """End a tool's process."""
        if tool in self._processes:
            self._processes.pop(tool).close()

    def ask(self, tool: str, id: str) -> AskedTool:
        """Ask a tool of the engine of one fault or variant."""
        if (tool, id) not in self._kept:
            process = self._processes.get(tool)
            if process is None or not process.is_alive:
                process = self._processes[tool] = ToolProcess(tool)
            self._kept[tool, id] = _asked(process, tool, id, self._seed, self._device, self._limit_s)
            _keep(self._out, self._seed, self._device, self._kept[tool, id])
        return self._kept[tool, id]


def ask_all(
    tools: Sequence[str],
    entries: Sequence[Fault | Variant],
    questions: Questions,
    progress: Progress | None = None,
) -> list[AskedTool]:
    """Ask every tool of every engine, one tool after the other."""
    report, done, total = progress or (lambda _label, _done, _total: None), 0, len(tools) * len(entries)
    asked = []
    for tool in tools:
        for entry in entries:
            report(f"{tool}: {entry.id}", done, total)
            done += 1
            asked.append(questions.ask(tool, entry.id))
        questions.close(tool)
    return asked


def _asked(process: ToolProcess, tool: str, id: str, seed: int, device: str, limit_s: float) -> AskedTool:
    question = {"tool": tool, "id": id, "seed": seed, "device": device}
    said = dict(NO_ANSWER)
    try:
        said |= process.ask(question, doing=id, timeout_s=limit_s)
    except HarnessError as error:
        if error.code not in (Code.ENGINE_FAILED, Code.ENGINE_TIMED_OUT):
            raise
        is_late = error.code is Code.ENGINE_TIMED_OUT
        said |= {"problem": f"no answer within {limit_s:g} s" if is_late else "its process ended", "seconds": limit_s}
    return _from_json({**said, "tool": tool, "id": id})


def _from_json(line: dict[str, Any]) -> AskedTool:
    return AskedTool(
        tool=line["tool"],
        id=line["id"],
        answers={name: ToolAnswer.from_json(said) for name, said in line["answers"].items()},
        distances=line["distances"],
        problem=line["problem"],
        notes=tuple(line["notes"]),
        seconds=line["seconds"],
        is_refused=line["is_refused"],
    )


def _kept(out: Path | None, seed: int, device: str) -> dict[tuple[str, str], AskedTool]:
    """Return the answers of earlier runs with this seed on this device; a line that was cut off does not count.

    A tool that gave no answer is asked again: it may be installed now, or get more time.
    """
    kept: dict[tuple[str, str], AskedTool] = {}
    if out is None or not (out / ANSWERS).exists():
        return kept
    for text in (out / ANSWERS).read_text(encoding="utf-8").splitlines():
        with suppress(ValueError, KeyError):
            line = json.loads(text)
            asked = _from_json(line)
            if (line["seed"], line["device"]) == (seed, device) and (asked.is_refused or not asked.problem):
                kept[asked.tool, asked.id] = asked
    return kept


def _keep(out: Path | None, seed: int, device: str, asked: AskedTool) -> None:
    if out is None:
        return
    answers = {name: said.as_json() for name, said in asked.answers.items()}
    line = {
        "tool": asked.tool, "id": asked.id, "seed": seed, "device": device, "answers": answers,
        "distances": asked.distances, "problem": asked.problem, "notes": asked.notes,
        "seconds": round(asked.seconds, 3), "is_refused": asked.is_refused,
    }  # fmt: skip
    with writing(out / ANSWERS):
        out.mkdir(parents=True, exist_ok=True)
        with (out / ANSWERS).open("a+b") as lines:
            if lines.tell():
                lines.seek(-1, os.SEEK_END)
                lines.write(b"" if lines.read() == b"\n" else b"\n")  # after a line that was cut off
            lines.write(json.dumps(line).encode() + b"\n")
