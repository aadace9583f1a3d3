"""The server's dialect, as the probe found it, and requests in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.server.endpoint.names import TokenNames

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The fields that the bodies of completions may have."""

    model: str
    takes_token_ids: bool = True
    """Whether prompts may be token ids; else they are text."""
    num_logprobs: int = 0
    """Likeliest tokens to ask for; 0: no log probabilities."""
    num_top: int = 0
    """Likeliest tokens that the server gives where so many are asked for."""
    options: tuple[tuple[str, Any], ...] = ()
    """Fields of its own that name token ids, or that go on after an end of text."""
    prompt_logprobs: tuple[tuple[str, Any], ...] = ()
    """Fields that ask for log probabilities of the prompt; empty if it has none."""

    def body(
        self, prompt: Sequence[int], max_tokens: int, names: TokenNames, *, with_prompt: bool = False
    ) -> dict[str, Any]:
        """Return the body of a greedy completion.

        Raises:
            HarnessError: ENDPOINT_CANNOT: the server takes text, and no text becomes these tokens.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt) if self.takes_token_ids else _text(prompt, names),
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if self.num_logprobs:
            body["logprobs"] = self.num_logprobs
        return body | dict(self.options) | (dict(self.prompt_logprobs) if with_prompt else {})


def _text(prompt: Sequence[int], names: TokenNames) -> str:
    text = names.text_of(prompt)
    if text is None:
        raise HarnessError(
            Code.ENDPOINT_CANNOT,
            "the server takes text alone, and no text becomes the tokens of this prompt",
            where="prompt",
            actual=f"{list(prompt)[:8]}{'...' if len(prompt) > 8 else ''}",
            hint='give the prompt as --prompt "..."',
        )
    return text
