"""The steps of an engine in a trace: whether they compute prefill or decode, and how much, by their annotations.

Every engine names its steps in a form of its own, with the sizes in the name. `_FORMS` reads them. Without it each size
would be a phase, and two traces would have no phase in common.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log2
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from harness.profiling.trace.columns import Trace
from harness.profiling.trace.device import is_of_device
from harness.profiling.trace.tables import SPAN


@dataclass(frozen=True, slots=True)
class TraceRange:
    """One step of a phase."""

    event: int
    """Number of the annotation's event; -1 where the whole trace counts as one step."""
    phase: str
    size: str = ""
    """In words, `32 requests`; empty where the annotation does not say it."""
    num_rows: int = 0
    """Tokens that it computes; 0 where the annotation does not say it."""
    at: int = 0
    """Its place among all steps."""


_FORMS = tuple(
    map(
        re.compile,
        (
            # vLLM; since 2026 with two numbers of tokens, and with ROCm's shapes of attention
            r"execute_context_(?P<prefills>\d+)\((?P<tokens>\d+)(?:_\d+)?\)_generation_(?P<decodes>\d+)\(",
            r"execute_\d+_context_(?P<prefills>\d+)\(sq(?P<tokens>\d+)sk\w*\)_generation_(?P<decodes>\d+)\(",
            # vLLM before
            r"execute_new_(?P<prefills>\d+)_cached_(?P<decodes>\d+)$",
            # TensorRT-LLM
            r"(?:\[Executor\] )?_forward_step(?: \d+)?: (?P<prefills>\d+) ctx reqs, (?P<decodes>\d+) gen reqs",
            # SGLang, and this harness
            r"step\[(?P<mode>[A-Z_]+)(?: bs=(?P<requests>\d+))?(?: toks=(?P<tokens>\d+))?",
            r"(?P<mode>[^\[\]]+)\[bs=(?P<requests>\d+) toks=(?P<tokens>\d+)",
            # any other that says its size in brackets
            r"(?P<mode>[^\[\]]+)\[.*\]$",
        ),
    )
)
_MODES = {"EXTEND": "prefill", "DECODE": "decode", "MIXED": "mixed"}
"""Of SGLang; another mode is a phase by its name in small letters."""
_NO_STEP = re.compile(
    r"## Call CompiledFxGraph|nccl:|gloo:|c10d::|Optimizer\.|PyTorch Profiler|capture_\d+"
    r"|cu(?:blas|dnn|sparse|solver)[A-Z]\w*$"
)
"""Annotations of torch, of NVIDIA's libraries and of captures of graphs, within steps or before all of them."""
_NUMBER = re.compile(r"#\d+$")


def stated_step(name: str) -> tuple[str, str, int] | None:
    """Return the phase that an annotation states, its size in words and its tokens; None for an unknown form."""
    match = next((match for form in _FORMS if (match := form.match(name))), None)
    if match is None:
        return None
    stated = {"requests": "", "tokens": "", "mode": ""} | {key: text or "" for key, text in match.groupdict().items()}
    mode, tokens = stated["mode"], int(stated["tokens"] or 0)
    if mode:
        phase = _MODES.get(mode, mode.lower() if mode.isupper() else mode)
        requests = int(stated["requests"] or 0)
        prefills, decodes = (0, requests) if phase == "decode" else (requests, 0)
    else:
        prefills, decodes = int(stated["prefills"]), int(stated["decodes"])
        phase = "mixed" if prefills and decodes else "prefill" if prefills else "decode" if decodes else "idle"
    tokens = tokens if prefills else 0
    size = [f"{prefills or decodes:,} {'request' if (prefills or decodes) == 1 else 'requests'}"]
    size[0] += f" of {tokens:,} tokens" if tokens else ""
    size = [*(size if prefills or decodes else ()), *([f"{decodes:,} decoding"] if prefills and decodes else ())]
    return phase, ", ".join(size), tokens + decodes


def find_steps(trace: Trace, pattern: re.Pattern[str] | None = None) -> tuple[TraceRange, ...]:
    """Return the steps of a trace in order of their start.

    Events whose names match `pattern` are steps; its first group is the phase, or the whole match. Without a pattern
    these are the annotations that state a step; where there are none, every annotation, without its number.
    """
    if pattern is not None:
        return tuple(_matching(trace, pattern))
    is_annotation = trace.are(lambda category, name: category == "user_annotation" and not SPAN.match(name))
    events = _in_order(trace, is_annotation)
    stated = [(event, form) for event in events if (form := stated_step(trace.name_of(event)))]
    if stated:
        steps = [TraceRange(event, *form, at=at) for at, (event, form) in enumerate(stated)]
        return tuple(outermost(trace, steps, by_phase=True))
    names = [(event, name) for event in events if not _NO_STEP.match(name := trace.name_of(event))]
    return tuple(TraceRange(event, _NUMBER.sub("", name), at=at) for at, (event, name) in enumerate(names))


def _matching(trace: Trace, pattern: re.Pattern[str]) -> Iterator[TraceRange]:
    def is_step(category: str, name: str) -> bool:
        is_on_device = is_of_device(category, name) or category.startswith("gpu_")  # torch repeats annotations there
        return not is_on_device and bool(pattern.search(name))

    for at, event in enumerate(_in_order(trace, trace.are(is_step))):
        match = pattern.search(trace.name_of(event))
        assert match is not None
        yield TraceRange(event, (match[1] if pattern.groups else None) or match[0], at=at)


def _in_order(trace: Trace, chosen: NDArray[np.bool_]) -> list[int]:
    events = np.flatnonzero(chosen)
    in_order: list[int] = events[np.lexsort((-trace.duration_ns[events], trace.start_ns[events]))].tolist()
    return in_order


def outermost(trace: Trace, steps: Iterable[TraceRange], *, by_phase: bool = False) -> Iterator[TraceRange]:
    """Leave out the steps within another one of their process, or of its phase: SGLang annotates a step twice."""
    ends: dict[object, int] = {}
    for step in steps:
        process, end = int(trace.processes[trace.thread[step.event]]), int(trace.end_ns[step.event])
        key = (process, step.phase) if by_phase else process
        if end > ends.get(key, -1):
            ends[key] = end
            yield step


def like_steps(
    before: Sequence[TraceRange], after: Sequence[TraceRange]
) -> tuple[list[TraceRange], list[TraceRange], tuple[str, ...]]:
    """Return the steps of both sides that can be compared, and the phases whose sizes have nothing in common.

    Of each size as many steps of either side are taken. If no size of a phase is equal, sizes of one range are alike,
    two ranges for each doubling; if none is, all steps of the phase are.
    """
    taken: tuple[list[TraceRange], list[TraceRange]] = ([], [])
    unlike = []
    for phase in dict.fromkeys(step.phase for step in (*before, *after)):
        sides = [[step for step in side if step.phase == phase] for side in (before, after)]
        for alike in (_size, _range, _phase):
            common = Counter(map(alike, sides[0])) & Counter(map(alike, sides[1]))
            if common:
                break
        unlike += [phase] if alike is _phase and all(sides) else []
        for chosen, side in zip(taken, sides, strict=True):
            left = common.copy()
            for step in side:
                if left[alike(step)] or not common:
                    left[alike(step)] -= 1
                    chosen.append(step)
    return *(sorted(chosen, key=lambda step: step.at) for chosen in taken), tuple(unlike)  # type: ignore[return-value]


def _range(step: TraceRange) -> float | None:
    return round(2 * log2(step.num_rows)) if step.num_rows else None


_size, _phase = attrgetter("size"), attrgetter("phase")
