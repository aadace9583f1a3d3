"""Checks that the package of an engine is installed, in a version that its adapter was run with."""

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from harness.errors import Code, HarnessError


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePackage:
    """A package that an adapter needs installed."""

    name: str
    """As its authors write it."""
    module: str
    distributions: tuple[str, ...]
    """Names in the package index, any of which brings the module."""
    known_versions: tuple[str, ...]
    """`major.minor` that the adapter was run with."""
    read_versions: tuple[str, ...] = ()
    """`major.minor` whose source was read and has all names that the adapter touches, and that were not run."""
    how_to_install: str
    why_imports_fail: str
    """The usual cause, and what to do."""

    def require(self, allowed: str | None = None) -> None:
        """Refuse a package that is missing, or of a version that the adapter was not run with.

        Args:
            allowed: a version that the user wants to try all the same.

        Raises:
            HarnessError: ENGINE_NOT_INSTALLED, ENGINE_VERSION.
        """
        installed = self._installed_version()
        if installed is None:
            raise HarnessError(
                Code.ENGINE_NOT_INSTALLED,
                f"{self.name} is not installed",
                where=f"--engine {self.module}",
                expected=f"the package {' or '.join(self.distributions)}",
                hint=self.how_to_install,
            )
        release = ".".join(installed.split(".")[:2])
        if installed != allowed and release not in self.known_versions:
            what = f"the adapter was never run with this version of {self.name}"
            if release in self.read_versions:
                what += ", though its source has all names that the adapter touches"
            raise HarnessError(
                Code.ENGINE_VERSION,
                what,
                where=f"--engine {self.module}",
                expected=", ".join(f"{known}.*" for known in self.known_versions),
                actual=installed,
                hint=f"--engine-option allow_version={installed} tries it: hooks may find other modules",
            )

    def load(self) -> None:
        """Import the package.

        Raises:
            HarnessError: ENGINE_NOT_INSTALLED, with what the import says.
        """
        try:
            import_module(self.module)
        except Exception as error:
            said = str(error).splitlines()[0] if str(error) else ""
            raise HarnessError(
                Code.ENGINE_NOT_INSTALLED,
                f"{self.name} cannot be imported: {type(error).__name__}: {said}",
                where=f"--engine {self.module}",
                expected=f"an environment in which `python -c 'import {self.module}'` works",
                hint=self.why_imports_fail,
            ) from error

    def _installed_version(self) -> str | None:
        for distribution in self.distributions:
            try:
                return version(distribution)
            except PackageNotFoundError:
                continue
        return None
