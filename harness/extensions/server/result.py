"""What every result about a server says: which server, and which model it should serve. Nothing here imports torch."""

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
