"""The process of a tool: it opens engines and asks the tool of each, one JSON line a question."""

import io
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import nn

from harness.engines.worker import serve
from harness.errors import Code, HarnessError
from harness.extensions.faults.answer import NO_ANSWER, Tool, ToolAnswer
from harness.extensions.faults.catalogue import entry_of
from harness.extensions.faults.fault import Fault, Variant
from harness.extensions.faults.operations import distance_to
from harness.extensions.faults.reference.injection import InjectedFault
from harness.extensions.faults.subject import ToolSubject, opened
from harness.extensions.faults.tools import open_tool
from harness.extensions.faults.zoo.quiet import quiet

_OF_THE_ENGINE = {Code.ENGINE_FAILED, Code.PROPERTY_VIOLATED, Code.BAD_RECORDER_CALL}
"""Errors that tell of the engine, the last one of a step that cannot be; any other tells that it was not checked."""
UNREACHED = "the code with the mistake never ran: the setting is wrong"


def main() -> None:
    """Answer questions on standard input until it ends."""
    torch.set_num_threads(1)
    serve(answer)


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Open the engine of a fault or variant, and return what a tool says of it, and what the tool did besides."""
    tool = open_tool(question["tool"])
    entry = entry_of(question["id"])
    if entry.engine not in tool.kinds:
        return {**NO_ANSWER, "problem": f"takes no {entry.engine}", "is_refused": True}
    try:
        with quiet(), opened(entry, seed=question["seed"], device=question["device"]) as (subject, planted):
            return asked(tool, subject, entry, planted)
    except Exception as error:  # such as a family that this transformers does not build
        traceback.print_exc()
        return {**NO_ANSWER, "problem": f"the engine does not open: {error}".splitlines()[0][:300]}


def asked(tool: Tool, subject: ToolSubject, entry: Fault | Variant, planted: InjectedFault) -> dict[str, Any]:
    """Ask a tool of an open engine; what it raises is a result."""
    before, begin = fingerprint(subject.engine), time.process_time()
    answers: Mapping[str, ToolAnswer] = {}
    problem = ""
    with _printed() as text:
        try:
            answers = tool.check(subject)
        except ImportError as error:
            problem = f"not installed: {error}"
        except HarnessError as error:
            if error.code in _OF_THE_ENGINE:
                answers = dict.fromkeys(tool.names, ToolAnswer(is_sound=False, error=str(error)))
            else:
                problem = f"{error.code}: {error.what}"
        except Exception as error:  # a tool that fails is a row of the table
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            traceback.print_exc()
    seconds = time.process_time() - begin
    notes = ["wrote to standard output"] if text.getvalue() else []
    if fingerprint(subject.engine) != before:
        notes.append("changed the model")
    if isinstance(entry, Fault) and planted.num_calls == 0 and subject.suite is None:
        answers, problem = {}, UNREACHED
    return {
        **NO_ANSWER,
        "answers": {name: said.as_json() for name, said in answers.items()},
        "problem": problem,
        "notes": notes,
        "seconds": seconds,
        "distances": _distances(entry, subject, answers),
    }


def _distances(
    entry: Fault | Variant, subject: ToolSubject, answers: Mapping[str, ToolAnswer]
) -> dict[str, int | None]:
    """Return how many operations an answer is away from the truth, where it is another one."""
    if not isinstance(entry, Fault) or entry.id.startswith(("drawn/", "power/")):
        return {}
    elsewhere = {
        name: said.operation
        for name, said in answers.items()
        if said.operation is not None and not entry.is_at(said.operation)
    }
    return distance_to(entry, subject, elsewhere) if elsewhere else {}


def fingerprint(engine: Any) -> object:
    """Return what must stay as it is under a tool: weights, buffers, hooks and forwards of a module."""
    if not isinstance(engine, nn.Module):
        return None
    tensors = (*engine.parameters(), *engine.buffers())
    bits = [hash(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()) for x in tensors]
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks), id(getattr(module.forward, "__func__", None)))
        for module in engine.modules()
    ]
    return bits, hooks, engine.training


@contextmanager
def _printed() -> Iterator[io.StringIO]:
    """Collect what is written to standard output, by Python or below it."""
    text = io.StringIO()
    sys.stdout.flush()
    kept = os.dup(1)
    with TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield text
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            text.write(file.read())
