"""A process that keeps one revision of an engine warm and runs its load whenever it is told to.

Started as a file, with another checkout's packages ahead on the path: it may use nothing that an older one lacks.
Reads a line for each run; answers with the seconds of each phase, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.checkpoint import read_config
from harness.engines import open_engine
from harness.engines.stepping import Session, open_session
from harness.profiling.passes.load import Load, PlannedStep, drive, rehearse
from harness.profiling.passes.timing import synchronize
from harness.profiling.passes.workload import ProfileWorkload
from harness.threads import suitable_threads


def serve(spec: dict[str, Any]) -> None:
    """Answer each line of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not do so into the answers
    folder = Path(spec["folder"])
    with suitable_threads(int(read_config(folder).get("hidden_size", 0))):
        engine = open_engine(
            spec["engine"], folder, dtype=spec["dtype"], device=spec["device"], options=spec["options"]
        )
        workload = ProfileWorkload(**spec["workload"])
        num_tokens = workload.batch_size * workload.num_prompt_tokens + workload.batch_size
        session = open_session(engine, max_num_tokens=num_tokens, max_num_seqs=workload.batch_size + 1)
        load = workload.load(session.model.vocab_size)
        steps = rehearse(session, load)
        for _ in sys.stdin:
            answers.write(json.dumps(time_phases(session, load, steps, spec["device"])) + "\n")
            answers.flush()


def time_phases(session: Session, load: Load, steps: Sequence[PlannedStep], device: str) -> dict[str, float]:
    """Run the load once and return the seconds of each phase."""
    seconds: defaultdict[str, float] = defaultdict(float)

    def take(index: int) -> Sequence[int]:
        synchronize(device)
        begin = time.perf_counter()
        requests = session.step()
        synchronize(device)
        seconds[steps[index].shape.phase] += time.perf_counter() - begin
        return requests

    drive(session, load, take)
    return dict(seconds)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
