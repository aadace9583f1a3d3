"""The address of a server with the client's limits, and the options that give it to every command."""

import ipaddress
import math
import os
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import typer

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
    """Read timeout of a request."""
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
        """Whether the server is on this machine: no proxy is used then."""
        host = str(urlsplit(self.url).hostname)
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


def api_key() -> str | None:
    """Return the key in the environment; None if it has none."""
    return os.environ.get(API_KEY) or None


def _bad_url(what: str, *, actual: str | None = None, hint: str | None = None) -> HarnessError:
    expected = "http://host:port"
    return HarnessError(Code.BAD_OPTION, what, where="--endpoint", expected=expected, actual=actual, hint=hint)


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """The options with the address of a server."""

    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of the server; its API key is read from the environment variable HARNESS_API_KEY."
        ),
    ] = None
    served_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the model on the server. [default: the first that it lists]"),
    ] = None
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of concurrent requests. [default: 8]")
    ] = None
    request_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Read timeout in seconds. [default: 60]")
    ] = None

    def address(self) -> Address:
        """Return the address of the server.

        Raises:
            HarnessError: BAD_OPTION: there is none, a value makes no sense, or the client's package is not installed.
        """
        if self.endpoint is None:
            hint = "add --endpoint http://host:port"
            raise HarnessError(Code.BAD_OPTION, "no server is named", where="--endpoint", hint=hint)
        _require_client()
        for option, value in (("--concurrency", self.concurrency), ("--request-timeout", self.request_timeout)):
            if value is not None and not 0 < value < math.inf:
                raise HarnessError(Code.BAD_OPTION, "it must be positive", where=option, actual=value)
        limits = {"concurrency": self.concurrency, "timeout_s": self.request_timeout}
        chosen = {name: value for name, value in limits.items() if value is not None}
        return Address(url=self.endpoint, served_model=self.served_model, **chosen)  # type: ignore[arg-type]


def _require_client() -> None:
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise HarnessError(
            Code.BAD_OPTION,
            f"the client needs a package that is not installed: {error.name}",
            where="--endpoint",
            hint="pip install -e '.[serve]' in the harness's checkout",
        ) from error
