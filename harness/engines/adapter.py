"""The interface of an engine under test, and functions that find an engine by name and open it.

Another package adds an engine by an entry point in the group `inference_harness.engines` that names a function with
the signature of `OpenEngine`. docs/write-an-adapter.md shows a complete example. This module does not import torch, so
that the command line can list the installed engines quickly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from harness.base import plugins
from harness.base.files import parse_json
from harness.base.numerics import Numerics
from harness.base.plugins import ENGINES
from harness.errors import Code, ExitStatus, HarnessError
from harness.formats.schedule import Schedule
from harness.formats.taps import Graph, Kind
from harness.results.check import SeenTensors, TapSource
from harness.results.settings import ModelSettings

if TYPE_CHECKING:
    from harness.engines.poison import Poison
    from harness.formats.recording import RecordingWriter, RequestInfo


LIMITS = ("max_num_batched_tokens", "max_num_seqs", "block_size", "num_blocks", "enable_prefix_caching")
"""Limits of a scheduler: tokens per step, concurrent requests, tokens per KV block, number of KV blocks (including
reserved ones), and whether prefix caching is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Arrivals, aborts, forks and limits of a workload that no schedule can express."""

    limits: Mapping[str, int | bool] = field(default_factory=dict)
    """Values by names in `Control.limits`; the engine chooses those that are absent."""
    arrivals: Mapping[int, int] = field(default_factory=dict)
    """Number of steps after which a request is added, by its id; 0 if absent. An idle engine gets the next request
    at once."""
    aborted: frozenset[int] = frozenset()
    """Requests that ask for one token more than they need, and are aborted when their last row is computed."""
    forks: Mapping[int, int] = field(default_factory=dict)
    """Parent of each forked request, by the id of the fork. It forks when the parent has made its first token."""


Part: TypeAlias = "tuple[RequestInfo, range]"
"""Rows of one request in one step, by position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work that an engine is asked to do."""

    requests: Sequence[RequestInfo]
    """Requests with all their tokens. Tokens after the prompt are *forced*, so that all rows align with the golden."""
    schedule: Schedule
    copies: Sequence[RequestInfo] = ()
    """Under a repeated schedule, the same requests in the same order: sent again when all have ended (`prefix-hit`), or
    forked from the first ones when these have made a token (`forked`). Under a schedule with drafts, the drafts of the
    requests (`RequestInfo.draft_of`)."""
    timeline: Timeline | None = None
    """If set, it replaces the schedule. Only engines with `Capabilities.control` get one."""
    taps: str = "all"
    """Preset of `--taps`. If it is not `all`, an engine may run as it does without observation."""
    is_served: bool = False
    """Whether nothing may be attached to the engine, no hook and no dispatch mode: only its logits are recorded."""
    poison: Poison | None = None
    """Unused memory to fill before each step; an engine that cannot do this ignores it."""

    @property
    def all_requests(self) -> list[RequestInfo]:
        """Requests, then copies."""
        return [*self.requests, *self.copies]

    @property
    def batches(self) -> list[list[RequestInfo]]:
        """Groups of requests that run together, one group after the other. Drafts run with their request."""
        requests = list(self.requests) if self.schedule.has_drafts else self.all_requests
        return [requests] if self.schedule.is_batched else [[request] for request in requests]

    def drafts(self, request: RequestInfo) -> list[RequestInfo]:
        """Return the drafts of a request that are rejected, in order."""
        drafts = [copy for copy in self.copies if getattr(copy, "draft_of", None) == request.id]
        return sorted(drafts, key=lambda draft: draft.prompt_length)

    def steps(self, request: RequestInfo) -> Iterator[list[Part]]:
        """Yield the rows of a request that each step computes, then those of the draft that it rejects.

        A step that begins at or before the last position of the previous step rewinds: the engine must discard the
        cache from that position on.
        """
        drafts, end = self.drafts(request), len(request.token_ids)
        if self.schedule.num_drafts:
            yield from _verifying(request, drafts, self.schedule.num_drafts)
            return
        pieces = self.schedule.pieces(request.prompt_length, end)
        for positions in pieces:
            yield [(request, positions)]
            for draft in (draft for draft in drafts if draft.prompt_length == positions.stop):
                for position in range(draft.prompt_length, len(draft.token_ids)):
                    yield [(draft, range(position, position + 1))]
                yield [
                    (request, range(positions.stop - 1, positions.stop))
                ]  # recomputed, since its logits choose the next token

    def num_blocks(self, block_size: int) -> int:
        """Return the number of KV blocks for the schedule: enough for all requests at once.

        Under `preempted`, the prompts and the longest request fit, but not all tokens that follow the prompts.
        """

        def blocks(num_tokens: int) -> int:
            return -(-num_tokens // block_size)

        lengths = [blocks(len(request.token_ids) + 1) for request in self.all_requests]
        if self.schedule.trigger == "preempted":
            return max(sum(blocks(request.prompt_length) for request in self.all_requests), max(lengths))
        return sum(lengths)


def _verifying(request: RequestInfo, drafts: Sequence[RequestInfo], num_drafts: int) -> Iterator[list[Part]]:
    """Yield the prompt, then steps of one token and `num_drafts` drafts; drafts before a rejected one are accepted."""
    yield [(request, range(request.prompt_length))]
    position, end = request.prompt_length, len(request.token_ids)
    while position < end:
        stop = min(end, position + 1 + num_drafts)
        draft = next((draft for draft in drafts if position < draft.prompt_length < stop), None)
        if draft is None:
            yield [(request, range(position, stop))]
            position = stop
        else:
            rejected = range(draft.prompt_length, len(draft.token_ids))
            yield [(request, range(position, draft.prompt_length)), (draft, rejected)]
            position = draft.prompt_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Parts of the scheduling that a workload may control; `harness fuzz` searches them."""

    limits: tuple[str, ...] = ()
    """The limits in `LIMITS` that a workload may set."""
    aborts: bool = False
    """Whether a running request can be aborted."""
    forks: bool = False
    """Whether a running request can be forked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of an engine. The harness runs every check that they allow, and lists the others."""

    schedules: tuple[str, ...]
    """Names of the schedules it can follow."""
    keeps_cache: bool = True
    """Whether its KV cache can be read back."""
    keeps_states: bool = False
    """Whether its recurrent and convolution states can be read back after a step."""
    unsupported_taps: tuple[str, ...] = ()
    """Sites (`self_attn.q_norm`, `mlp.act`) that it cannot record, or single taps by their full name."""
    sampled_only: tuple[str, ...] = ()
    """Taps that it computes only for sampled rows; other rows do not count as missing."""
    control: Control | None = None
    """What a `Timeline` may control besides arrivals; None if the engine only follows named schedules."""
    numerics: Numerics | None = None
    """Arithmetic that is not in the dtype of the engine; selects the conventions for judging it."""
    notes: tuple[str, ...] = ()
    """Notes of the adapter for the report."""
    seen: SeenTensors | None = None
    """What was seen of an engine whose tensors are found and not named."""
    sources: Mapping[str, TapSource] = field(default_factory=dict)
    """Tensor and code of each tap in the engine, if known."""
    takes_images: bool = False
    """Whether it takes requests with images (`RequestInfo.inputs`)."""
    not_served: str | None = "its adapter does not declare that it can run unobserved"
    """Why it cannot run as it is served; None if it does so where `Workload.is_served` asks for it."""
    has_decode: bool = True
    """Whether it computes tokens after the prompt. If not, a check requires no decode step, and the report says so."""

    def all_unsupported_taps(self) -> tuple[str, ...]:
        """Return all sites and taps it cannot record."""
        caches = () if self.keeps_cache else ("k_cache", "v_cache")
        return tuple(dict.fromkeys((*self.unsupported_taps, *caches)))

    def wanted(self, graph: Graph) -> list[str]:
        """Return the taps of the graph that a recording of this engine must hold."""
        unsupported = set(self.all_unsupported_taps())
        return [
            operation.tap
            for operation in graph
            if unsupported.isdisjoint((operation.site, operation.tap))
            and (self.keeps_states or operation.kind is not Kind.STATE)
        ]


@runtime_checkable
class Engine(Protocol):
    """An engine under test."""

    name: str
    capabilities: Capabilities

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Compute the tokens of every request under the schedule, and write the taps of each step to `writer`.

        The engine computes every position of every request (a copy may share those of its original), and the logits of
        the last prompt token and every token after it. Pass its greedy choice for each of these to `writer.end_step`.
        Write the cache at the end of a request as a step of phase `readback`. No state may remain after a run.
        """


@runtime_checkable
class TapMatcher(Protocol):
    """An engine whose taps depend on the model; optional, beside `Engine`."""

    def match_taps(self, graph: Graph) -> None:
        """Find the taps of the graph in the engine, and set `capabilities`. Called before the first run.

        Raises:
            HarnessError: the declared taps of the engine do not match the graph.
        """


@runtime_checkable
class SettingsShower(Protocol):
    """An engine that shows the settings that it computes with; optional, beside `Engine`."""

    def resolved_settings(self) -> ModelSettings:
        """Return the settings with which the engine computes.

        Include only values in use: a value that is read from config.json again proves nothing. Omit unknown settings.
        Called before the first run, and before `match_taps`.
        """


@runtime_checkable
class PromptContinuer(Protocol):
    """An engine that continues prompts; optional, beside `Engine`, for one that shows no steps (`open_session`)."""

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """Continue all prompts together, greedily and past every end-of-sequence token; return the new tokens."""


class OpenEngine(Protocol):
    """Opens an engine on a checkpoint; the object an entry point names."""

    def __call__(self, folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> Engine:
        """Open the checkpoint in `folder`; raise HarnessError for what the engine cannot serve."""


def engine_names() -> list[str]:
    """Return the names of all installed engines."""
    return plugins.names(ENGINES)


_LIBRARIES = {
    "llamacpp": "llama_cpp",
    "mlx": "mlx_lm",
    "onnxruntime": "onnxruntime_genai",
    "openvino": "openvino",
    "vllm": "vllm",
}
"""Library that each adapter of the harness for another engine imports."""


def installed_engine_names() -> list[str]:
    """Return the names of usable engines: adapters of the harness count only if their library is installed."""
    return [name for name in engine_names() if not _lacks_library(name)]


def _lacks_library(name: str) -> bool:
    return plugins.is_ours(ENGINES, name) and name in _LIBRARIES and find_spec(_LIBRARIES[name]) is None


def own_adapter(name: str) -> str | None:
    """Return the `module:function` of the adapter of the harness with this name; None for another package."""
    return plugins.entry(ENGINES, name).value if plugins.is_ours(ENGINES, name) else None


def open_engine(
    name: str,
    folder: Path,
    *,
    dtype: str,
    device: str,
    options: Mapping[str, str] | None = None,
    adapter: str | None = None,
) -> Engine:
    """Open the engine of that name on a checkpoint.

    Args:
        name: name of the engine.
        folder: folder of the checkpoint.
        dtype: dtype of the engine.
        device: device of the engine.
        options: options of the engine.
        adapter: `module:function` that opens it, for an environment without its entry point.

    Raises:
        HarnessError: UNKNOWN_ENGINE, with the installed names; ENGINE_FAILED: it cannot be imported or opened; or any
            HarnessError that the engine raises for bad input.
    """
    opener = _load(plugins.entry(ENGINES, name) if adapter is None else EntryPoint(name, adapter, ENGINES))
    with engine_errors(name):
        engine = opener(folder, dtype=dtype, device=device, options=dict(options or {}))
        check_engine(name, engine)
    return engine


_OURS = ("harness.engines.reference:", "harness.engines.hf:")


def is_foreign(name: str) -> bool:
    """Return whether the engine itself is code of another package, wherever its adapter is.

    Raises:
        HarnessError: UNKNOWN_ENGINE.
    """
    return not plugins.entry(ENGINES, name).value.startswith(_OURS)


def engine_module(name: str) -> str:
    """Return the module that opens the engine of that name.

    Raises:
        HarnessError: UNKNOWN_ENGINE.
    """
    return plugins.entry(ENGINES, name).module


def check_engine(name: str, engine: object) -> None:
    """Refuse an object that is not an engine, or whose capabilities are invalid.

    Raises:
        HarnessError: ENGINE_FAILED.
    """
    if not isinstance(engine, Engine):
        raise _no_engine(
            name, "the opened object is not an engine", "an object with name, capabilities and run", type(engine)
        )
    capabilities = engine.capabilities
    if not isinstance(capabilities, Capabilities):
        raise _no_engine(
            name, "the engine's capabilities have the wrong type", "a harness.engines.Capabilities", type(capabilities)
        )
    for part in ("schedules", "unsupported_taps", "sampled_only"):
        names = getattr(capabilities, part)
        if not isinstance(names, tuple | list) or not all(isinstance(entry, str) for entry in names):
            raise _no_engine(name, f"the engine's capabilities have no list of {part}", "a tuple of names", repr(names))


def shown_settings(name: str, engine: object) -> ModelSettings:
    """Return the settings that an engine shows; empty if it shows none.

    Raises:
        HarnessError: ENGINE_FAILED.
    """
    if not isinstance(engine, SettingsShower):
        return ModelSettings()
    with engine_errors(name):
        shown: object = engine.resolved_settings()
    if not isinstance(shown, ModelSettings):
        expected = "a harness.engines.ModelSettings"
        raise _no_engine(name, "resolved_settings returns another type", expected, type(shown))
    return shown


def _no_engine(name: str, what: str, expected: str, actual: type | str) -> HarnessError:
    return HarnessError(
        Code.ENGINE_FAILED,
        what,
        where=name,
        expected=expected,
        actual=actual if isinstance(actual, str) else actual.__name__,
        hint="docs/write-an-adapter.md shows a complete one",
    )


@contextmanager
def engine_errors(engine: str) -> Iterator[None]:
    """Turn any exception of an engine, including SystemExit, into a HarnessError that names the engine.

    A HarnessError for bad input is raised unchanged.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise  # Ctrl-C, as far as can be known
    except BaseException as error:
        if isinstance(error, HarnessError) and error.exit_status is ExitStatus.BAD_INPUT:
            raise
        raise HarnessError(
            Code.ENGINE_FAILED,
            f"the engine raised {type(error).__name__}: {error}",
            where=engine,
            hint="; ".join([*getattr(error, "__notes__", ()), "set HARNESS_TRACEBACK=1 to see where"]),
        ) from error


@contextmanager
def engine_refusals(engine: str, where: Path | str) -> Iterator[None]:
    """Turn an exception of an engine into an error that says that it cannot serve the model, with its message.

    For engines that raise a general exception for this: ValueError, RuntimeError, OSError, ...

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE.
    """
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"{engine} cannot run the model: {' '.join(_words(error).split()[:60])}",
            where=where,
            hint=f"give {engine} what it asks for as --engine-option NAME=VALUE, or another model",
        ) from error


def _words(error: Exception) -> str:
    """Return the message of an error; for a ValidationError of pydantic, only the first message."""
    details = error.errors() if hasattr(error, "errors") else None
    return details[0]["msg"] if details else str(error) or type(error).__name__


def refuse_unknown_options(name: str, options: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise BAD_OPTION for an engine option that the engine does not have."""
    unknown = [option for option in options if option not in known]
    if unknown:
        raise HarnessError(
            Code.BAD_OPTION,
            f"engine {name!r} has no option {unknown[0]!r}",
            where="--engine-option",
            expected=", ".join(known) or "no options",
            actual=f"{unknown[0]}={options[unknown[0]]}",
        )


def _load(entry: EntryPoint) -> OpenEngine:
    try:
        opened: OpenEngine = entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a foreign package may raise anything at import
        raise HarnessError(
            Code.ENGINE_FAILED,
            f"the engine {entry.name!r} cannot be imported: {type(error).__name__}: {error}",
            where=entry.value,
            hint="set HARNESS_TRACEBACK=1 to see where",
        ) from error
    return opened


_PYTHON = {"True": True, "False": False, "None": None}


def parse_flag(name: str, text: str) -> bool:
    """Return whether an option is on.

    Raises:
        HarnessError: BAD_OPTION: it is neither `true` nor `false`.
    """
    if text not in ("true", "false"):
        what = f"{name} must be true or false"
        raise HarnessError(Code.BAD_OPTION, what, where="--engine-option", expected="true or false", actual=text)
    return text == "true"


def parse_value(text: str) -> Any:
    """Parse a text as JSON, or as True, False or None of Python; return the text itself if it is neither."""
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return parse_json(text)
    except ValueError:
        return text
