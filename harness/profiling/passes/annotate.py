"""Additions to a trace that has been written, so that other tools read it correctly.

torch writes a span of an engine's operation as an operator: sums of operators, TensorBoard's for one, would count it
and all within it twice. Here spans become user annotations. Tracks of counters show the running requests and the K and
V that they hold, and arrows lead from each step to the next.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.profiling.span_names import SPAN
from harness.results.profile import StepShape

_FLOW = "next step"


def annotate(path: Path, steps: Sequence[StepShape], *, kv_bytes_per_token: int) -> None:
    """Rewrite a gzipped trace of these steps.

    Steps are in order of time; `kv_bytes_per_token` are those of one token in all layers.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        document = json.load(file)
    events = document["traceEvents"]
    for event in events:
        if event.get("cat") == "cpu_op" and SPAN.match(event["name"]):
            event["cat"] = "user_annotation"
    labels = {step.label for step in steps}
    shown = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in labels]
    shown.sort(key=lambda event: float(event["ts"]))
    for event, step in zip(shown, steps, strict=False):
        events += _counters(event, step, kv_bytes_per_token)
    events += _flows(shown)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(document, file, ensure_ascii=False)


def _counters(event: dict[str, Any], step: StepShape, kv_bytes_per_token: int) -> Iterator[dict[str, Any]]:
    """Yield what the counters are from the step on: it has room for its tokens when it begins."""
    values = {
        "running requests": {"requests": len(step.query_lens)},
        "K and V held": {"bytes": sum(step.context_lens) * kv_bytes_per_token},
    }
    for name, value in values.items():
        yield {"ph": "C", "name": name, "pid": event["pid"], "tid": event["tid"], "ts": event["ts"], "args": value}


def _flows(shown: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield an arrow from each step to the next."""
    for number, (one, other) in enumerate(pairwise(shown)):
        common = {"cat": _FLOW, "name": _FLOW, "id": number}
        end = float(one["ts"]) + 0.999 * float(one["dur"])
        yield {"ph": "s", "pid": one["pid"], "tid": one["tid"], "ts": end, **common}
        yield {"ph": "f", "bp": "e", "pid": other["pid"], "tid": other["tid"], "ts": other["ts"], **common}
