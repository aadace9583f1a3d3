"""A correctness and profiling harness for LLM inference engines.

    import harness

    report = harness.check(my_model, model="path/to/checkpoint", prompts=["Hello, world"])
    report.assert_ok()

`check`, `diff`, `golden`, `profile`, `rollout` and `weights` are the commands of the same names, and `tensor` reads one
tensor of anything that holds tensors (docs/python-api.md). `tool_calls` holds a parser to a chat template
(docs/tool-calls.md), `structured_output` masks to an automaton (docs/structured-output.md). `audit` says which of some
hypotheses a server serves (docs/audit.md).
Importing this package imports neither torch nor transformers: the pytest plugin must cost nothing until a case runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.version import __version__

if TYPE_CHECKING:
    from harness.api import (
        AuditReport,
        CheckFailedError,
        CheckReport,
        FunctionReport,
        GapError,
        ProfileReport,
        RolloutMonitor,
        RolloutReport,
        audit,
        check,
        diff,
        golden,
        profile,
        rollout,
        structured_output,
        tensor,
        tool_calls,
        weights,
    )
    from harness.engines import Capabilities, Engine, Workload
    from harness.errors import Code, HarnessError

__all__ = [
    "AuditReport",
    "Capabilities",
    "CheckFailedError",
    "CheckReport",
    "Code",
    "Engine",
    "FunctionReport",
    "GapError",
    "HarnessError",
    "ProfileReport",
    "RolloutMonitor",
    "RolloutReport",
    "Workload",
    "__version__",
    "audit",
    "check",
    "diff",
    "golden",
    "profile",
    "rollout",
    "structured_output",
    "tensor",
    "tool_calls",
    "weights",
]

_HOMES = {
    **dict.fromkeys(__all__, "harness.api"),
    **dict.fromkeys(("Capabilities", "Engine", "Workload"), "harness.engines"),
    **dict.fromkeys(("Code", "HarnessError"), "harness.errors"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
