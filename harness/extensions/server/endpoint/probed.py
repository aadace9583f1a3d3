"""What the probe of a server found."""

from dataclasses import dataclass, field

from harness.errors import Code, HarnessError
from harness.extensions.server.endpoint.dialect import Dialect
from harness.extensions.server.endpoint.result import Capability
from harness.results.check import Finding

FATAL = (Code.ENDPOINT_UNREACHABLE, Code.ENDPOINT_TIMED_OUT, Code.ENDPOINT_HUNG_UP)
"""Errors that end the probe: another request would end in them, too."""


@dataclass(slots=True)
class Probed:
    """The result of the probe."""

    dialect: Dialect
    server: str = ""
    capabilities: list[Capability] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Whether a capability was found."""
        return any(found.name == name and found.is_there for found in self.capabilities)

    def note(self, name: str, is_there: bool, detail: str = "") -> bool:
        """Keep what was found of one feature, and return whether it is there."""
        self.capabilities.append(Capability(name=name, is_there=is_there, detail=detail))
        return is_there

    def ignores(self, name: str, detail: str) -> None:
        """Keep that the server takes a field and does not follow it."""
        self.capabilities.append(Capability(name=name, is_there=False, is_ignored=True, detail=detail))


def words(error: HarnessError) -> str:
    """Return what a server says in the place of an answer."""
    return error.what if error.actual is None else f"{error.what}: {error.actual}"


def failure(number: int, error: HarnessError) -> Finding:
    """Return the finding of a request that was not answered."""
    return Finding(code=error.code, message=words(error), request=number)
