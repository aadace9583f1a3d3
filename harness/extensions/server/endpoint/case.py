"""One answer of a server, with all that it is judged by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.errors import Code
from harness.extensions.server.endpoint.answer import Completion
from harness.extensions.server.endpoint.truth import TruthRow
from harness.results.check import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """Log probabilities that an answer must have: the probe found them."""

    has_logprobs: bool
    """Of the new tokens."""
    num_top: int
    """Likeliest tokens of each new token."""
    has_prompt: bool
    """Of the tokens of the prompt."""
    counts_prompt: bool
    """Whether the tokens of the prompt are known to the server as they were sent, so that it can count them."""
    is_named_alone: Callable[[int], bool]
    """Whether the server's name of a token is no other token's: two tokens of one name leave one entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCompletion:
    """One answer with what it is judged by."""

    request: int
    prompt: tuple[int, ...]
    answer: Completion
    rows: Mapping[int, TruthRow]
    """Of the first schedule's walk, which the answer may leave at a tie."""
    walked: tuple[int, ...]
    """The new tokens along which the rows are true."""
    asked_tokens: int
    eos: frozenset[int]
    promised: Promised

    @property
    def num_shared(self) -> int:
        """New tokens that the answer has in common with the walk."""
        pairs = zip(self.answer.token_ids, self.walked, strict=False)
        return next((at for at, (own, walked) in enumerate(pairs) if own != walked), min(self.lengths))

    @property
    def lengths(self) -> tuple[int, int]:
        """New tokens of the answer, and of the walk."""
        return len(self.answer.token_ids), len(self.walked)

    def finding(self, message: str, position: int | None = None, code: Code = Code.ENDPOINT_LOGPROBS) -> Finding:
        """Return a finding about this answer."""
        return Finding(code=code, message=message, request=self.request, position=position)

    def row(self, at: int) -> TruthRow | None:
        """Return the row that gives the new token of a number; None after the end of the walk."""
        return self.rows.get(len(self.prompt) + at - 1)

    @property
    def parts(self) -> bool:
        """Whether the answer leaves the walk."""
        return self.num_shared < min(self.lengths)
