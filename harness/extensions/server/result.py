"""What every result about a server says: which server it is, and what it can do. Nothing here imports torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerResult:
    """The server of a result."""

    url: str
    server: str
    """The server's own name and version; empty if it names none."""
    served_model: str
    """The name under which it serves the model."""
    model: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One thing that a server was asked for."""

    name: str
    """`token id prompts`, `logprobs`, `streaming`, ..."""
    is_there: bool
    detail: str = ""
    """The extent of the feature, or the server's answer in its place."""
    is_ignored: bool = False
    """Whether the server takes the field that asks for it, and does not do what the field says."""
