"""Results of a check of chats, as plain data for the reports. Nothing here imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.errors import Code
from harness.results.check import Finding, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One way in which a server sees conversations differently, at the shortest conversation that shows it."""

    name: str
    """`BOS twice`, `tools dropped`, `other tokens`, ..."""
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    expected: str
    actual: str
    """Around the first difference."""
    expected_ids: Sequence[int]
    actual_ids: Sequence[int] | None
    """None: the server does not show them."""
    body: Mapping[str, Any] | None = None
    """Of the request, to send by hand; None for a function."""
    path: str = "/v1/chat/completions"
    """Of the request."""
    code: Code = Code.CONVERSATION_DIFFERS

    @property
    def sentence(self) -> str:
        """What is different, in one line."""
        turns = " / ".join(f"{message['role']}: {message['content']!r:.60}" for message in self.messages)
        tools = f" with {len(self.tools)} tool" if self.tools else ""
        return f"{self.name}: of {turns}{tools} the model should see {self.expected}, and sees {self.actual}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensResult:
    """A whole check of chats."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    subject: str
    """The URL of a server, or the name of a function."""
    server: str
    served_model: str
    model: str
    evidence: str
    """How it is known what was seen: `prompt_token_ids`, ..., `usage.prompt_tokens`."""
    proves: str
    """What that shows."""
    features: Sequence[str]
    """Parts that conversations had."""
    num_conversations: int
    num_texts: int = 0
    """Texts that were tokenised and put together again."""
    num_ends: int = 0
    """Tokens of the generation config that were seen to end an answer."""
    num_answers: int = 0
    """Answers whose text was judged."""
    differences: Sequence[Difference]
    not_judged: Mapping[str, str]
    """What was not judged, and why."""
    findings: Sequence[Finding] = ()
    """Beside the differences."""
    notes: Sequence[str] = ()

    @property
    def outcome(self) -> Outcome:
        """Nothing, if no conversation was compared."""
        if self.differences or self.findings:
            return Outcome.MISMATCH
        return Outcome.PASS if self.num_conversations else Outcome.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDifference:
    """One way in which a function differs, at the smallest input that shows it."""

    code: Code
    name: str
    """`a string turned to a number`, `a special token is allowed`, ..."""
    shown: Mapping[str, str]
    """For people: what was given, expected and returned, by a label each."""
    data: Mapping[str, Any]
    """For programs: the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionResult:
    """A whole check of a function."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    subject: str
    """The name of the function."""
    model: str
    counts: Mapping[str, int]
    """What was judged: `text`, `stream`; `mask`, `schema`."""
    differences: Sequence[FunctionDifference]
    not_judged: Mapping[str, str]
    """What was not judged, and why."""
    notes: Sequence[str]

    @property
    def outcome(self) -> Outcome:
        """Mismatch if anything differs; nothing, if nothing was judged."""
        if self.differences:
            return Outcome.MISMATCH
        return Outcome.PASS if any(self.counts.values()) else Outcome.NOTHING
