"""A continuation, with its counts and times."""

import math
from dataclasses import dataclass
from typing import Any

from harness.report.document import document


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedContinuation:
    """A continuation, and how long it took."""

    text: str
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    elapsed_seconds: float
    """From the request to the last token; loading comes before."""
    ttft_ms: float
    """Time to first token."""
    device: str
    dtype: str

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by elapsed time."""
        return len(self.token_ids) / self.elapsed_seconds

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first; NaN where there is one alone."""
        num_later = len(self.token_ids) - 1
        return (1000 * self.elapsed_seconds - self.ttft_ms) / num_later if num_later else math.nan

    def stats(self) -> str:
        """Return everything but the text on one line."""
        return (
            f"prompt_tokens={self.num_prompt_tokens} generated_tokens={len(self.token_ids)} "
            f"elapsed_seconds={self.elapsed_seconds:.4f} tokens_per_second={self.tokens_per_second:.2f} "
            f"ttft_ms={self.ttft_ms:.2f} tpot_ms={self.tpot_ms:.2f} device={self.device} dtype={self.dtype}"
        )

    def line(self) -> str:
        """Return the text, and the end of its last line."""
        return f"{self.text}\n"

    def json(self) -> dict[str, Any]:
        """Return everything as JSON-able data."""
        whole = document(self)
        return whole | {
            "prompt_tokens": whole.pop("num_prompt_tokens"),
            "generated_tokens": len(self.token_ids),
            "tokens_per_second": self.tokens_per_second,
            "tpot_ms": None if math.isnan(self.tpot_ms) else self.tpot_ms,
        }
