"""The address of a server, and its client's time limits."""

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from harness.errors import Code, HarnessError

API_KEY = "HARNESS_API_KEY"
"""Environment variable with the key that is sent as bearer token: no option has it, and nothing prints it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A server, as its client sees it.

    Raises:
        HarnessError: BAD_OPTION: the URL is none, or has a password in it.
    """

    url: str
    """Without the `/v1` at its end."""
    served_model: str | None = None
    """Name of the model to ask for; None: what the server lists."""
    concurrency: int = 8
    """Most requests at a time."""
    timeout_s: float = 60.0
    """Longest silence of the server in the middle of a request."""
    retries: int = 3
    """Times that a request is sent again after 429, 5xx or a lost connection."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _bad_url("the server's address is no URL", actual=self.url)
        if parts.username or parts.password:
            raise _bad_url("the URL has a name or a password in it", hint=f"put the key into {API_KEY}")
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine: no proxy stands between then."""
        host = str(urlsplit(self.url).hostname)
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


def api_key() -> str | None:
    """Return the key of the environment; None if there is none."""
    return os.environ.get(API_KEY) or None


def _bad_url(what: str, *, actual: str | None = None, hint: str | None = None) -> HarnessError:
    expected = "http://host:port"
    return HarnessError(Code.BAD_OPTION, what, where="--endpoint", expected=expected, actual=actual, hint=hint)
