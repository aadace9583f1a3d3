"""Names of differences between two masks: what kind of token, and where it would stand."""

import re

_NUMBER = re.compile(r"[-+.eE\d]+")
_KINDS = {
    '"': "the beginning of a string", "{": "an object", "[": "an array", "tfn": "a constant", ",": "a comma",
    ":": "a colon", "}": "the end of an object", "]": "the end of an array",
}  # fmt: skip
"""What begins with a character."""


_ESCAPE = r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})"
_CHARACTERS = re.compile(rf'(?:[^"\\]|{_ESCAPE})*(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?')


def is_open(before: str, token: str, *, is_allowed: bool) -> bool:
    """Return whether a token may be allowed or not: DEL in a string, and escapes of JSON that llguidance leaves out."""
    if not is_allowed or not _is_in_string(before) or "\x7f" in token:
        return "\x7f" in token
    _, mark, begun = re.sub(_ESCAPE, "", before).rpartition("\\")
    text = f"{mark}{begun}{token}" if mark else token
    rest = _CHARACTERS.sub("", text, count=1)
    return "\\" in text and rest[:1] in ("", '"')


def name_token(before: str, token: str, *, is_end: bool, is_special: bool, is_allowed: bool) -> str:
    """Return what is wrong about one token.

    `token` is the text of the token, with U+FFFD for a part of a character. `is_allowed` says that the mask allows it,
    and the reference does not; else it is the other way around.
    """
    if is_end:
        return "the answer may end before it is whole" if is_allowed else "a whole answer may not end"
    how = "is allowed" if is_allowed else "is masked"
    if is_special:
        return f"a special token {how}"
    if _is_in_string(before):
        return f"{_in_string(token)} {how}"
    if not token.strip():
        return f"whitespace between values {how}"
    if _NUMBER.fullmatch(token):
        return f"a part of a number {how}"
    kind = next((kind for first, kind in _KINDS.items() if token.strip()[0] in first), "text that is no JSON")
    return f"{kind}{' and more in the same token' if len(token.strip()) > 1 and kind != 'a constant' else ''} {how}"


def _in_string(token: str) -> str:
    if "\ufffd" in token:
        return "a part of a character"
    if any(ord(own) < 32 for own in token):
        return "a control character in a string"
    if "\\" in token:
        return "an escape"
    if '"' in token:
        return "the end of a string" + ("" if token == '"' else " and more in the same token")
    return "a character of a string" if token.isascii() else "a character outside of ASCII"


def _is_in_string(text: str) -> bool:
    return len(re.findall(r'"', re.sub(r"\\.", "", text))) % 2 == 1
