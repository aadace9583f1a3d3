"""Errors of a folder that is no checkpoint, or of a file in it that cannot be used."""

from typing import NoReturn

from harness.errors import Code, HarnessError


def not_a_checkpoint(what: str, where: object, hint: str) -> NoReturn:
    """Raise NOT_A_CHECKPOINT."""
    expected = "a folder in HuggingFace's layout, or a hub id"
    raise HarnessError(Code.NOT_A_CHECKPOINT, what, where=where, expected=expected, hint=hint)


def bad_config(what: str, where: object, actual: object) -> NoReturn:
    """Raise BAD_CONFIG."""
    raise HarnessError(Code.BAD_CONFIG, what, where=where, actual=actual, hint="download the checkpoint again")
