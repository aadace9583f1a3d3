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
        CheckFailedError,
        CheckReport,
        ProfileReport,
        check,
        diff,
        golden,
        profile,
        tensor,
        weights,
    )
    from harness.engines import Capabilities, Engine, Workload
    from harness.errors import Code, HarnessError

__all__ = [
    "Capabilities",
    "CheckFailedError",
    "CheckReport",
    "Code",
    "Engine",
    "HarnessError",
    "ProfileReport",
    "Workload",
    "__version__",
    "check",
    "diff",
    "golden",
    "profile",
    "tensor",
    "weights",
]

_HOMES = {
    **dict.fromkeys(__all__, "harness.api"),
    **dict.fromkeys(("Capabilities", "Engine", "Workload"), "harness.engines"),
    **dict.fromkeys(("Code", "HarnessError"), "harness.errors"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if not name.startswith("_"):
        from harness.base import plugins

        if name in plugins.names(plugins.FUNCTIONS):
            return plugins.load(plugins.FUNCTIONS, name, object)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from harness.base import plugins

    return sorted({*globals(), *__all__, *plugins.names(plugins.FUNCTIONS)})
