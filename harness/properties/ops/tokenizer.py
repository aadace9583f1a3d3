"""Properties of a tokenizer: text comes back, whole and in pieces."""

from functools import partial
from typing import Any

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st

from harness.properties.core.falsify import calling, falsify
from harness.properties.core.findings import Counterexample, Rejections, raise_all
from harness.properties.ops.adapter import OpsUnderTest


def check_tokenizer(named: Any, settings: Settings) -> Rejections:
    """Check that `decode` undoes `encode`, and that pieces of `detokenize` make up the whole; nothing without them.

    Raises:
        PropertyError: they do not.
    """
    target = OpsUnderTest(named)
    if not (target.offers("encode") and target.offers("decode")):
        return Rejections()
    alphabet = target.declares("alphabet")
    texts = st.text(max_size=40) if alphabet is None else st.text(alphabet, max_size=40)
    checks = {"a text that is encoded and decoded is the same": _check_text}
    if target.offers("detokenize"):
        checks["pieces of a text make up the whole"] = _check_pieces
    return raise_all(
        partial(falsify, sentence, partial(check, target), texts, settings) for sentence, check in checks.items()
    )


def _check_text(target: OpsUnderTest, text: str) -> None:
    def program() -> str:
        lines = [f"text = {text!r}", "assert ops.decode(ops.encode(text)) == text"]
        return "\n".join([*target.opening(), "", *lines]) + "\n"

    with calling("encode or decode", program):
        found = target.adapter.decode(target.adapter.encode(text))
    if found != text:
        raise Counterexample(f"{text!r} comes back as {found!r}", program())


def _check_pieces(target: OpsUnderTest, text: str) -> None:
    def program() -> str:
        lines = [f"tokens = ops.encode({text!r})", 'assert "".join(ops.detokenize(tokens)) == ops.decode(tokens)']
        return "\n".join([*target.opening(), "", *lines]) + "\n"

    with calling("detokenize", program):
        tokens = target.adapter.encode(text)
        found, expected = "".join(target.adapter.detokenize(tokens)), target.adapter.decode(tokens)
    if found != expected:
        raise Counterexample(f"the pieces make {found!r}, the whole is {expected!r}", program())
