"""The adapters that the options name, and the fixtures that hand them to the suites."""

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from harness.errors import Code, HarnessError

__all__ = ["ADAPTERS", "load_adapter", "option_of"]

ADAPTERS = {
    "block_manager": "harness.properties.reference.blocks:BlockManagerSubject",
    "scheduler": "harness.properties.reference.scheduler:SchedulerSubject",
    "state_cache": "harness.properties.reference.states:StateCacheSubject",
    "attention": "harness.properties.reference.attention:PagedSubject",
    "engine": "harness.properties.reference.engine:EngineSubject",
    "ops": "harness.properties.reference.ops:Ops",
}
"""By the name of the fixture, what is tested without the option: the reference engine."""


def option_of(name: str) -> str:
    """Return the option of a fixture."""
    return f"--{name.replace('_', '-')}"


def _fixture(name: str) -> Any:
    """Return a fixture that hands out what the option of its name names."""

    @pytest.fixture(scope="session", name=name)
    def adapter(request: pytest.FixtureRequest) -> Iterator[Any]:
        yield from _adapter(request)

    return adapter


block_manager, scheduler, state_cache, attention, engine, ops = map(_fixture, ADAPTERS)


def _adapter(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield the object that the fixture's option names; its module may lie where pytest was started."""
    from harness.properties.core.adapter import NamedAdapter

    name = str(request.fixturename)
    path = request.config.getoption(name) or ADAPTERS[name]
    if name == "engine" and ":" not in path:
        yield _installed(path, request.config.getoption("engine_model"))
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(request.config.invocation_params.dir), *sys.path])
        yield NamedAdapter.at(path, load_adapter(path, option=option_of(name)))


def _installed(name: str, model: str | None) -> Any:
    """Return the adapter of an engine that is installed for every command of the harness."""
    from harness.properties.core.adapter import NamedAdapter
    from harness.properties.engine.installed import installed_engine

    arguments = repr(name) if model is None else f"{name!r}, {model!r}"
    module = "harness.properties.engine.installed"
    imports = (f"from {module} import installed_engine",)
    return NamedAdapter(installed_engine(name, model), imports, f"installed_engine({arguments})")


def load_adapter(path: str, *, option: str) -> Any:
    """Import `module:name`.

    Raises:
        HarnessError: there is no such module or no such name in it.
    """
    module_name, colon, name = path.partition(":")
    try:
        if not (module_name and colon and name):
            raise ImportError("it is not of the form module:name")
        target: Any = import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise HarnessError(
            Code.BAD_ADAPTER, f"the adapter cannot be imported: {error}", where=option,
            expected="module:name, importable from where pytest was started", actual=path,
        ) from error  # fmt: skip
    return target
