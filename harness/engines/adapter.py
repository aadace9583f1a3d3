"""The interface of an engine under test, and how the harness finds one by its name and opens it.

An engine of another package joins by an entry point in the group `inference_harness.engines` that names a function
with the signature of `OpenEngine`. docs/write-an-adapter.md shows a complete one. Nothing here imports torch, so that
the command line can name the installed engines at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from harness.base.files import parse_json
from harness.base.numerics import Numerics
from harness.errors import Code, ExitStatus, HarnessError
from harness.formats.schedule import Schedule
from harness.formats.taps import Graph, Kind
from harness.results.check import TapSource
from harness.results.settings import ModelSettings

if TYPE_CHECKING:
    from harness.engines.poison import Poison
    from harness.formats.recording import RecordingWriter, RequestInfo


GROUP = "inference_harness.engines"
LIMITS = ("max_num_batched_tokens", "max_num_seqs", "block_size", "num_blocks", "enable_prefix_caching")
"""Tokens of a step, requests that run at once, tokens of a KV block, KV blocks with those that no request can have, and
whether requests find the beginnings of others in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When requests come and go, and under which limits, where a workload says more than a schedule can."""

    limits: Mapping[str, int | bool] = field(default_factory=dict)
    """By names of `Control.limits`; what is absent is the engine's own choice."""
    arrivals: Mapping[int, int] = field(default_factory=dict)
    """Steps that the engine has run when a request is added, by the request's id; 0 if it is absent. An engine that
    has nothing left to do is given the next one at once."""
    aborted: frozenset[int] = frozenset()
    """Requests that ask for one token more than they need, and are aborted as soon as the last row is computed."""
    forks: Mapping[int, int] = field(default_factory=dict)
    """By a request's id, the one that it is forked from as soon as that has made its first token."""


Part: TypeAlias = "tuple[RequestInfo, range]"
"""Rows of one request in one step, by position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work that an engine is asked to do."""

    requests: Sequence[RequestInfo]
    """The tokens to be fed; those after the prompt are *forced*, so that all rows align with the golden's."""
    schedule: Schedule
    copies: Sequence[RequestInfo] = ()
    """Under a repeated schedule, the same requests in the same order, to be sent again (`prefix-hit`: when all have
    ended) or forked from the first ones (`forked`: as soon as these have made a token). Under a schedule with drafts,
    the drafts of the requests (`RequestInfo.draft_of`)."""
    timeline: Timeline | None = None
    """If given, it replaces the schedule; only engines with `Capabilities.control` are given one."""
    taps: str = "all"
    """What is asked for, a preset of `--taps`. Where it is less than `all`, an engine may run as it does unobserved."""
    poison: Poison | None = None
    """What to fill before each step, of memory that no live row may depend on; an engine that cannot leaves it."""

    @property
    def all_requests(self) -> list[RequestInfo]:
        """Requests, then copies."""
        return [*self.requests, *self.copies]

    @property
    def batches(self) -> list[list[RequestInfo]]:
        """All requests in groups that run together, one group after the other; drafts run with what they are of."""
        requests = list(self.requests) if self.schedule.has_drafts else self.all_requests
        return [requests] if self.schedule.is_batched else [[request] for request in requests]

    def drafts(self, request: RequestInfo) -> list[RequestInfo]:
        """Return what a request computes and gives up again, in the order in which it does."""
        drafts = [copy for copy in self.copies if getattr(copy, "draft_of", None) == request.id]
        return sorted(drafts, key=lambda draft: draft.prompt_length)

    def steps(self, request: RequestInfo) -> Iterator[list[Part]]:
        """Yield what each step computes of a request: its own rows, then those of the draft that it then gives up.

        A step whose first position is not after the last one of the step before goes back: what the cache holds from
        that position on is to be forgotten.
        """
        drafts, end = self.drafts(request), len(request.token_ids)
        if self.schedule.num_drafts:
            yield from _verifying(request, drafts, self.schedule.num_drafts)
            return
        pieces = self.schedule.pieces(request.prompt_length, end)
        for positions in pieces:
            yield [(request, positions)]
            for draft in [item for item in drafts if item.prompt_length == positions.stop]:
                for position in range(draft.prompt_length, len(draft.token_ids)):
                    yield [(draft, range(position, position + 1))]
                yield [(request, range(positions.stop - 1, positions.stop))]  # its logits choose the next token

    def num_blocks(self, block_size: int) -> int:
        """Return how many KV blocks the schedule leaves to the requests: enough for all of them at once.

        Under `preempted` all prompts fit, and the longest request, but not all that follows the prompts.
        """

        def blocks(num_tokens: int) -> int:
            return -(-num_tokens // block_size)

        lengths = [blocks(len(request.token_ids) + 1) for request in self.all_requests]
        if self.schedule.trigger == "preempted":
            return max(sum(blocks(request.prompt_length) for request in self.all_requests), max(lengths))
        return sum(lengths)


def _verifying(request: RequestInfo, drafts: Sequence[RequestInfo], num_drafts: int) -> Iterator[list[Part]]:
    """Yield the prompt, then steps of one token and so many drafts; those before a rejected one are accepted."""
    yield [(request, range(request.prompt_length))]
    position, end = request.prompt_length, len(request.token_ids)
    while position < end:
        stop = min(end, position + 1 + num_drafts)
        draft = next((item for item in drafts if position < item.prompt_length < stop), None)
        if draft is None:
            yield [(request, range(position, stop))]
            position = stop
        else:
            rejected = range(draft.prompt_length, len(draft.token_ids))
            yield [(request, range(position, draft.prompt_length)), (draft, rejected)]
            position = draft.prompt_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The parts of its scheduling that an engine leaves to a workload: `harness fuzz` searches them."""

    limits: tuple[str, ...] = ()
    """Of `LIMITS`, those that it lets a workload set."""
    aborts: bool = False
    """Whether a running request can be aborted."""
    forks: bool = False
    """Whether a running request can be forked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of an engine. The harness runs every check that they allow, and says which it could not."""

    schedules: tuple[str, ...]
    """Names of the schedules it can follow."""
    keeps_cache: bool = True
    """Whether its KV cache can be read back."""
    keeps_states: bool = False
    """Whether the states of its recurrences and convolutions can be read back after a step."""
    unsupported_taps: tuple[str, ...] = ()
    """Sites (`self_attn.q_norm`, `mlp.act`) whose taps it cannot record; or single taps by their full name."""
    sampled_only: tuple[str, ...] = ()
    """Taps that it computes only for the rows it samples from: the others are not missing."""
    control: Control | None = None
    """What a `Timeline` may say to it: requests arrive at any step, and what is named here; None: it follows schedules
    by name only."""
    numerics: Numerics | None = None
    """Set if its arithmetic is not all in its dtype: chooses the conventions that it is judged by."""
    notes: tuple[str, ...] = ()
    """What its adapter has set in it, for the report."""
    sources: Mapping[str, TapSource] = field(default_factory=dict)
    """Where its taps are in it, as far as that is known."""
    takes_images: bool = False
    """Whether it takes requests with images (`RequestInfo.inputs`)."""
    has_decode: bool = True
    """Whether it computes tokens after a prompt; a check of one that does not requires no decode step, and says so."""

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
        """Feed every request's tokens under the schedule and write each step's taps to `writer`.

        Every position of every request is computed (a copy's where it cannot share the first one's), and the logits of
        the last prompt token and of every token after it; `writer.end_step` receives the engine's own greedy choice for
        each of those. What the cache holds at the end of a request is written as a step of phase `readback`. Nothing is
        left over from one run to the next.
        """


@runtime_checkable
class TapMatcher(Protocol):
    """An engine whose taps depend on the model; optional, beside `Engine`."""

    def match_taps(self, graph: Graph) -> None:
        """Find the taps of a model's graph and set `capabilities`. Called before the first run.

        Raises:
            HarnessError: what the engine was told of its taps does not fit the graph.
        """


@runtime_checkable
class SettingsShower(Protocol):
    """An engine that shows the settings that it computes with; optional, beside `Engine`."""

    def resolved_settings(self) -> ModelSettings:
        """Return what the engine has made of the checkpoint's config, as far as it can show it.

        Only what it computes with: a value read from config.json a second time proves nothing. What is not known is
        left out. Called before the first run, and before `match_taps`.
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
    return sorted({entry.name for entry in entry_points(group=GROUP)})


_LIBRARIES = {
    "llamacpp": "llama_cpp",
    "mlx": "mlx_lm",
    "onnxruntime": "onnxruntime_genai",
    "openvino": "openvino",
    "vllm": "vllm",
}
"""What our own adapters of other engines import."""


def installed_engine_names() -> list[str]:
    """Return the names of the engines that are here: of our own adapters, those whose library is installed."""
    missing = {name for name, library in _LIBRARIES.items() if own_adapter(name) and find_spec(library) is None}
    return [name for name in engine_names() if name not in missing]


def own_adapter(name: str) -> str | None:
    """Return where the harness's own adapter of that name is (`module:function`); None for another package's."""
    ours = (entry.value for entry in entry_points(group=GROUP) if entry.name == name)
    return next((value for value in ours if value.startswith("harness.")), None)


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
        name: of the engine.
        folder: of the checkpoint.
        dtype: of the engine.
        device: of the engine.
        options: of the engine.
        adapter: where the function is that opens it, in an environment whose entry points do not know it.

    Raises:
        HarnessError: UNKNOWN_ENGINE, with the names there are; ENGINE_FAILED where it cannot be imported or opened;
            or what the engine's own opening raises.
    """
    opener = _load(_entry(name) if adapter is None else EntryPoint(name, adapter, GROUP))
    with engine_errors(name):
        engine = opener(folder, dtype=dtype, device=device, options=dict(options or {}))
        check_engine(name, engine)
    return engine


_OURS = ("harness.engines.reference:", "harness.engines.hf:")


def is_foreign(name: str) -> bool:
    """Return whether the engine of that name is another package's code, no matter which package its adapter is in.

    Raises:
        HarnessError: UNKNOWN_ENGINE.
    """
    return not _entry(name).value.startswith(_OURS)


def engine_module(name: str) -> str:
    """Return the module that opens the engine of that name.

    Raises:
        HarnessError: UNKNOWN_ENGINE.
    """
    return _entry(name).module


def check_engine(name: str, engine: object) -> None:
    """Refuse an object that is no engine, or whose declarations cannot be read.

    Raises:
        HarnessError: ENGINE_FAILED.
    """
    if not isinstance(engine, Engine):
        raise _no_engine(name, "what is opened is no engine", "an object with name, capabilities and run", type(engine))
    capabilities = engine.capabilities
    if not isinstance(capabilities, Capabilities):
        raise _no_engine(
            name, "the engine's capabilities are none", "a harness.engines.Capabilities", type(capabilities)
        )
    for part in ("schedules", "unsupported_taps", "sampled_only"):
        names = getattr(capabilities, part)
        if not isinstance(names, tuple | list) or not all(isinstance(item, str) for item in names):
            raise _no_engine(name, f"the engine's capabilities have no list of {part}", "a tuple of names", repr(names))


def shown_settings(name: str, engine: object) -> ModelSettings:
    """Return the settings that an engine shows; none where it shows none.

    Raises:
        HarnessError: ENGINE_FAILED.
    """
    if not isinstance(engine, SettingsShower):
        return ModelSettings()
    with engine_errors(name):
        shown: object = engine.resolved_settings()
    if not isinstance(shown, ModelSettings):
        expected = "a harness.engines.ModelSettings"
        raise _no_engine(name, "what resolved_settings returns is no settings", expected, type(shown))
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
    """Turn any exception of an engine, an attempt to end the process included, into an error that names it.

    An error of the harness passes if it says that the input cannot be served: no engine ends a command in another way.
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
            hint="set HARNESS_TRACEBACK=1 to see where",
        ) from error


@contextmanager
def engine_refusals(engine: str, where: Path | str) -> Iterator[None]:
    """Turn what an engine raises into an error that says, in the engine's words, that it cannot serve the model.

    For engines that have no error of their own for it, and raise ValueError, RuntimeError, OSError, ...

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
    """Return what an error says; a ValidationError of pydantic says it among much else."""
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


def _entry(name: str) -> EntryPoint:
    entries = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if not entries:
        raise HarnessError(
            Code.UNKNOWN_ENGINE,
            f"no engine is called {name!r}",
            where=f"entry points of the group {GROUP!r}",
            expected=", ".join(engine_names()),
            actual=name,
            hint="install the package that provides it",
        )
    if len({entry.value for entry in entries}) > 1:
        raise HarnessError(
            Code.UNKNOWN_ENGINE,
            f"several engines are called {name!r}",
            where=f"entry points of the group {GROUP!r}",
            actual=", ".join(sorted(entry.value for entry in entries)),
            hint="uninstall one of the packages",
        )
    return entries[0]


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
    """Return what a text says as JSON, or as Python's True, False or None; the text itself if it says neither."""
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return parse_json(text)
    except ValueError:
        return text
