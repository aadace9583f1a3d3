"""Regressions planted into traces that others made: does the first sentence of `harness trace diff` name them?

    python tests/benchmarks/trace_regressions_real.py TRACE...

Time is inserted into the trace: what runs at that moment takes longer, all that follows comes later. Each trace gets
longer kernels of its three largest categories, its longest GEMM under another name, waits of the host, and a slow
function of Python; each adds some 30 % to a step. The words that the sentence must have follow from what was planted.
"""

import argparse
import gzip
import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.profiling.trace.compare import diff_files
from harness.profiling.trace.kernels import category_of, readable

Event = dict[str, Any]
SHARE = 0.3
"""Of the time of all steps that a plant adds."""


def stretched(events: list[Event], inserts: list[tuple[float, float]]) -> list[Event]:
    """Insert so much time at such moments."""
    inserts = sorted(inserts)
    moments = [moment for moment, _ in inserts]
    added = [0.0, *accumulate(duration for _, duration in inserts)]
    changed = []
    for event in events:
        if "ts" in event:
            begin, end = float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))
            event = event | {"ts": begin + added[bisect_right(moments, begin)]}
            if "dur" in event:
                event["dur"] = end + added[bisect_right(moments, end)] - event["ts"]
        changed.append(event)
    return changed


def is_step(event: Event) -> bool:
    return event.get("ph") == "X" and event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep")


def plants(events: list[Event]) -> Iterator[tuple[str, list[Event], str]]:
    """Yield name, events and the words that the sentence must have."""
    steps = [event for event in events if is_step(event)]
    spans = [(float(step["ts"]), float(step["ts"]) + float(step["dur"])) for step in steps]
    budget = SHARE * sum(end - begin for begin, end in spans)
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = [event for event in kernels if float(event["ts"]) >= spans[0][0]]  # the host may be steps ahead
    times = Counter[str]()
    for kernel in kernels:
        times[category_of(kernel["name"])] += kernel["dur"]
    for category, total in times.most_common(3):
        chosen = [kernel for kernel in kernels if category_of(kernel["name"]) == category]
        inserts = [(kernel["ts"] + kernel["dur"] / 2, budget * kernel["dur"] / total) for kernel in chosen]
        yield f"{category} longer", stretched(events, inserts), category
    gemms = Counter[str]()
    for kernel in kernels:
        gemms[kernel["name"]] += kernel["dur"] if category_of(kernel["name"]) == "GEMM" else 0
    (longest, total), *_ = gemms.most_common(1)
    chosen = [kernel for kernel in kernels if kernel["name"] == longest]
    inserts = [(kernel["ts"] + kernel["dur"] / 2, budget * kernel["dur"] / total) for kernel in chosen]
    renamed = [event | {"name": "planted_gemm_tile"} if event.get("name") == longest else event for event in events]
    yield "another GEMM", stretched(renamed, inserts), f"GEMM & moved from {readable(longest)} to planted_gemm_tile"
    for name, category, words in (
        ("cudaStreamSynchronize", "cuda_runtime", "waits for the device"),
        ("planted.py(1): slow", "python_function", "planted.py(1): slow"),
    ):
        if len(changed := called(events, kernels, spans, budget, name, category)) > len(events):
            yield name, changed, words


def called(
    events: list[Event], kernels: list[Event], spans: list[tuple[float, float]], budget: float, name: str, category: str
) -> list[Event]:
    """Return the events with a call before operators of each step, where no kernel runs: up to a hundred in all."""
    thread = next(event for event in events if is_step(event))
    running = sorted((float(kernel["ts"]), float(kernel["ts"]) + kernel["dur"]) for kernel in kernels)
    until = list(accumulate((end for _, end in running), max))
    places = []
    for event in events:
        at = bisect_right(running, (float(event.get("ts", 0)), float("inf"))) - 1
        is_operator = event.get("cat") == "cpu_op" and event["tid"] == thread["tid"]
        if (
            is_operator
            and any(begin < event["ts"] < end for begin, end in spans)
            and (at < 0 or until[at] < event["ts"])
        ):
            places.append(float(event["ts"]) - 0.001)
    places = sorted(places)[:: len(places) // 100 + 1]
    duration = budget / max(1, len(places))
    changed = stretched(events, [(place, duration) for place in places])
    for number, place in enumerate(places):
        where = {"pid": thread["pid"], "tid": thread["tid"], "ts": place + number * duration, "dur": duration}
        changed.append({"ph": "X", "cat": category, "name": name, "args": {}, **where})
    return changed


def is_right(sentence: str, words: str) -> bool:
    return all(word.strip() in sentence for word in words.split("&"))


def main(show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    rows = []
    for path in parser.parse_args().traces:
        with gzip.open(path) as file:
            document = json.load(file)
        with tempfile.TemporaryDirectory() as folder:
            for name, events, words in plants(document["traceEvents"]):
                after = Path(folder) / f"{name}.json"
                after.write_text(json.dumps({**document, "traceEvents": events}))
                sentence = diff_files(path, after).sentence
                rows.append([path.name[:28], name, "yes" if is_right(sentence, words) else "NO", sentence])
                after.unlink()
    show(tabulate(rows, ["trace", "planted", "named", "first sentence"], tablefmt="github"))
    show(f"\n{sum(row[2] == 'yes' for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
