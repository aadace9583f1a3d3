"""A process that keeps one version of an engine warm and runs its load whenever it is told to.

Run as a file by the fork server, with another version's packages ahead on the path: of `harness` it uses nothing but
the engine's protocol, which an older version has too. It says first which sources it runs. Then it answers each line
with the CPU and wall seconds of each phase, as JSON.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.base import threads
from harness.engines import open_engine
from harness.engines.stepping import open_session
from harness.formats.checkpoint import Checkpoint

# An older version calls it `suitable_threads`.
limit_threads = getattr(threads, "limit_threads" if hasattr(threads, "limit_threads") else "suitable_threads")

_WARM_RUNS = 3
"""The first runs after loading take up to twice as long."""


def serve(spec: dict[str, Any]) -> None:
    """Answer each line of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not do so into the answers
    with limit_threads(Checkpoint.of(spec["folder"]).hidden_size):
        held = _shift_memory(spec["placement"])
        run = LoadedEngine(spec)
        gc.collect()
        gc.freeze()  # a collection of all that is imported takes four times as long as a run of a tiny model
        _tell(answers, {"sources": sources(spec["packages"]), "threads": torch.get_num_threads()})
        for _ in sys.stdin:
            gc.collect()
            _tell(answers, run.time_phases())
        del held


def _shift_memory(placement: int) -> list[bytearray]:
    """Allocate memory to shift the engine's: equally in both processes of a pair, differently in the next pair."""
    draw = random.Random(placement)
    return [bytearray(draw.randrange(1 << 20)) for _ in range(4)]


def _tell(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def sources(packages: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the place of each imported package, and a digest of its code."""
    imported = {}
    for package in packages:
        module = sys.modules.get(package)
        file = getattr(module, "__file__", None)
        if file is not None:
            root = Path(file)
            files = sorted(root.parent.rglob("*")) if root.name == "__init__.py" else [root]
            digest = hashlib.sha256()
            for path in files:
                if path.suffix in (".py", ".so") and path.is_file():
                    digest.update(str(path.relative_to(root.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
            imported[package] = (str(root), digest.hexdigest())
    return imported


class LoadedEngine:
    """A loaded engine and a load whose steps are known by phase, to run many times."""

    def __init__(self, spec: dict[str, Any]) -> None:
        draw, device = random.Random(0), spec["device"]
        num_prompt_tokens, self._max_new_tokens = zip(*spec["lengths"], strict=True)
        engine = open_engine(
            spec["engine"], Path(spec["folder"]), dtype=spec["dtype"], device=device, options=spec["options"]
        )
        num_seqs = len(num_prompt_tokens)
        session = open_session(engine, max_num_tokens=sum(num_prompt_tokens) + num_seqs, max_num_seqs=num_seqs + 1)
        self._session = session
        self._prompts = [
            [draw.randrange(session.model.vocab_size) for _ in range(length)] for length in num_prompt_tokens
        ]
        is_cuda = torch.device(device).type == "cuda"
        self._synchronize: Callable[[], Any] = (lambda: torch.cuda.synchronize(device)) if is_cuda else lambda: None
        self.phases: list[str] = []
        """Of each step."""
        with session.watching(self):
            self._drive(lambda _index: session.step())
        for _ in range(_WARM_RUNS):
            self._drive(lambda _index: session.step())

    def begin_step(self, shape: Any) -> None:
        """See `Watcher`."""
        self.phases.append(shape.phase)

    def reached(self, name: str) -> None:
        """See `Watcher`."""

    def time_phases(self) -> dict[str, dict[str, float]]:
        """Run the load once and return the CPU and wall seconds of each phase."""
        seconds = {phase: {"cpu": 0.0, "wall": 0.0} for phase in self.phases}

        def take(index: int) -> Sequence[int]:
            self._synchronize()
            wall, cpu = time.perf_counter(), time.process_time()
            requests: Sequence[int] = self._session.step()
            self._synchronize()
            phase_seconds = seconds[self.phases[index]]
            phase_seconds["cpu"] += time.process_time() - cpu
            phase_seconds["wall"] += time.perf_counter() - wall
            return requests

        self._drive(take)
        return seconds

    def _drive(self, take: Callable[[int], Sequence[int]]) -> None:
        num_tokens: Counter[int] = Counter()
        try:
            wanted = zip(self._prompts, self._max_new_tokens, strict=True)
            longest = max(self._max_new_tokens)
            limits = {self._session.add(prompt, limit + (limit == longest)): limit for prompt, limit in wanted}
            index = 0
            while any(num_tokens[request] < limit for request, limit in limits.items()):
                num_tokens.update(take(index))
                index += 1
        finally:
            self._session.stop()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
