"""Chats from Python: a parser of tool calls against HF's template, masks of schemas against a reference automaton."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.api.arguments import named_as_arguments
from harness.base.progress import Progress, no_progress
from harness.extensions.server.chat.report import function_text
from harness.extensions.server.chat.result import FunctionResult
from harness.results.check import Outcome

if TYPE_CHECKING:
    from harness.extensions.server.chat.masks import MaskFunction
    from harness.extensions.server.chat.tool_calls import ParseFunction, StreamFunction


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FunctionReport(FunctionResult):
    """How a function differs, as a result with text. It is true if nothing differs."""

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def assert_ok(self) -> None:
        """Raise AssertionError with the whole result unless something was judged and nothing differs."""
        __tracebackhide__ = True  # pytest shows the caller's line
        assert self, str(self)

    def __str__(self) -> str:
        return function_text(self, width=100)


def structured_output(
    mask: "MaskFunction",
    *,
    model: str | Path,
    schemas: Sequence[Mapping[str, Any]] = (),
    num_schemas: int = 50,
    seed: int = 0,
    limit_s: float = 5.0,
    progress: Progress | None = None,
    local_files_only: bool = True,
) -> FunctionReport:
    """Compare the masks of structured output with a reference automaton, llguidance's, along random walks.

    Args:
        mask: takes a JSON schema and the tokens of the answer so far, and returns the ids of the tokens that may come
            next, or a boolean for each token.
        model: whose tokenizer it is: a folder, the name of an embedded checkpoint, or a hub id.
        schemas: to walk through; none: they are generated.
        num_schemas: to generate.
        seed: of the schemas.
        limit_s: longest time of one mask; only the main thread can keep it.
        progress: called with what is being done, how much of it is done, and how much there is.
        local_files_only: never ask the model hub.

    Returns:
        What was found. A wrong mask is a result, not an error: see `FunctionReport.assert_ok`.

    Raises:
        HarnessError: there is no tokenizer, llguidance is not installed, or it does not take one of `schemas`.
    """
    from harness.extensions.server.chat.masks import MaskCheck
    from harness.formats.checkpoint import Checkpoint, resolve

    with named_as_arguments():
        checkpoint = Checkpoint(resolve(str(model), local_files_only=local_files_only))
        job = MaskCheck(checkpoint.tokenizer.hf, mask, limit_s, progress or no_progress)
        result = job.result(str(checkpoint.folder), num_schemas, seed, schemas)
    return FunctionReport(**{field.name: getattr(result, field.name) for field in fields(result)})


def tool_calls(
    parse: "ParseFunction",
    *,
    model: str | Path,
    stream: "StreamFunction | None" = None,
    num_answers: int = 200,
    seed: int = 0,
    limit_s: float = 5.0,
    progress: Progress | None = None,
    local_files_only: bool = True,
) -> FunctionReport:
    """Check that a parser of tool calls reads what HF's chat template writes.

    Args:
        parse: takes the text of the model and the tools, and returns a message in OpenAI's form, or a list of calls.
        model: whose template is the truth: a folder with a tokenizer, the name of an embedded checkpoint, or a hub id.
        stream: takes the pieces of the text and the tools, and yields deltas in OpenAI's form; None: not judged.
        num_answers: to generate, beside those with a hard text each.
        seed: of the answers.
        limit_s: longest time of one text; only the main thread can keep it.
        progress: called with what is being done, how much of it is done, and how much there is.
        local_files_only: never ask the model hub.

    Returns:
        What was found. A wrong parser is a result, not an error: see `FunctionReport.assert_ok`.

    Raises:
        HarnessError: there is no tokenizer or no chat template, or the template writes no tool calls.
    """
    from harness.extensions.server.chat.tool_calls import ParserCheck, Writer
    from harness.formats.checkpoint import Checkpoint, resolve

    with named_as_arguments():
        checkpoint = Checkpoint(resolve(str(model), local_files_only=local_files_only))
        job = ParserCheck(Writer(checkpoint), parse, stream, limit_s, progress or no_progress)
        result = job.result(str(checkpoint.folder), num_answers, seed)
    return FunctionReport(**{field.name: getattr(result, field.name) for field in fields(result)})
