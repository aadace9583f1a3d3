"""The reference: llguidance's automaton of a JSON schema over the tokens of a model."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import Code, HarnessError

SPACING: Mapping[str, Mapping[str, Any]] = {
    "any whitespace": {},
    "no whitespace": {"whitespace_flexible": False},
    "a space after commas and colons": {
        "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
    },
}  # fmt: skip
"""Where whitespace may stand, which a schema leaves open."""


class Automaton:
    """Masks of one tokenizer.

    Raises:
        HarnessError: PACKAGE_MISSING; NO_TOKENIZER: it is none of bytes that llguidance takes.
    """

    def __init__(self, hf: Any) -> None:
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            hint = "pip install -e '.[test]' in the harness's checkout; for llguidance alone, pip install llguidance"
            what = "the reference automaton of JSON schemas is llguidance's, which is not installed"
            raise HarnessError(Code.PACKAGE_MISSING, what, where="llguidance", hint=hint) from None
        self._library = llguidance
        try:
            self._tokens = llguidance.hf.from_tokenizer(hf, n_vocab=len(hf), eos_token=hf.eos_token_id)
        except Exception as error:
            what = "llguidance does not take the tokenizer"
            raise HarnessError(Code.NO_TOKENIZER, what, where=hf.name_or_path, actual=str(error)[:200]) from error
        self._opened = lru_cache(maxsize=64)(self._open)

    def allowed(self, schema: Mapping[str, Any], spacing: str, token_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens may come next, a boolean each.

        Raises:
            HarnessError: BAD_SCHEMA: the automaton does not take the schema.
        """
        matcher = self._opened(json.dumps(schema), spacing).deep_copy()
        taken = matcher.consume_tokens(list(token_ids))
        assert taken, "the walk took a token that the automaton forbids"
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._tokens.vocab_size].astype(bool)

    def num_taken(self, schema: Mapping[str, Any], spacing: str, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens follow the schema; raises HarnessError as `allowed`."""
        known = list(takewhile(lambda token_id: token_id < self._tokens.vocab_size, token_ids))
        taken: int = self._opened(json.dumps(schema), spacing).deep_copy().validate_tokens(known)
        return taken

    def _open(self, schema: str, spacing: str) -> Any:
        # Where the text is certain, llguidance would allow the tokenizer's own tokens of it alone.
        spaced = json.dumps({**json.loads(schema), "x-guidance": SPACING[spacing]})
        lark = f'%llguidance {{"no_forcing": true}}\nstart: %json {spaced}'
        try:
            grammar = self._library.LLMatcher.grammar_from_lark(lark)
            matcher = self._library.LLMatcher(self._tokens, grammar, log_level=0)
            refusal = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            refusal = str(error)
        if refusal:
            what, expected = "the reference automaton does not take the schema", "a schema that llguidance takes"
            raise HarnessError(Code.BAD_SCHEMA, what, where=schema[:200], expected=expected, actual=refusal[:200])
        return matcher
