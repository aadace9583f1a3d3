"""What every test shares: one torch thread, and a golden cache that is not the user's."""

import gc
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from packaging.version import Version

from harness.base.memory import collect_rarely

from .costs import mean_costs, too_expensive

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: a second thread costs more than it brings
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("no time limits", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no time limits")  # a machine under load is no finding

collect_rarely()  # a tenth of the suite's time

CASES = Path(__file__).parent.parent / "cases"
STORIES = Path(__file__).parent.parent.parent / "shared" / "models" / "stories260k"


SHOWN_CASES = {
    "default",
    "llama-float16",
    "llama-forked",
    "qwen2-preempted",
    "qwen2-tensor-parallel",
    "qwen3-prefix-hit",
}
"""Cases that the default suite checks. `pytest cases` checks all of them."""


NEWEST = Path(__file__).parent / "newest.txt"


def _is_newer_than_any_we_ran(line: str) -> bool:
    name, _, known = line.partition("==")
    try:
        return bool(known) and Version(Version(version(name)).public) > Version(known)  # "+cpu" is the same release
    except PackageNotFoundError:
        return False


def pytest_configure(config: pytest.Config) -> None:
    """Show deprecations, and do not fail, where a package is newer than any that CI ran: the suite stays useful."""
    if any(map(_is_newer_than_any_we_ran, NEWEST.read_text(encoding="utf-8").splitlines())):
        for category in ("DeprecationWarning", "FutureWarning", "PendingDeprecationWarning"):
            config.addinivalue_line("filterwarnings", f"default::{category}")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but a sample of cases as slow, by a fixed seed.

    `@pytest.mark.sampled(3)` keeps three cases of a test. The expensive tests of a file keep a share of their time:
    see `tests.costs`.
    """
    for item in items:
        if item.path.parent == CASES and item.path.stem not in SHOWN_CASES:
            item.add_marker("slow")
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        (number,) = of_test[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        chosen = random.Random(0).sample(range(len(of_test)), min(number, len(of_test)))
        for index, item in enumerate(of_test):
            if index not in chosen:
                item.add_marker("slow")
    files: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("slow") is None:
            files[item.nodeid.partition("::")[0]][item.nodeid] = item
    for of_file in files.values():
        for case in too_expensive(list(of_file), mean_costs()):
            of_file[case].add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of collections of garbage that tests ask for."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep goldens made by tests out of the user's cache; tests of one session share them."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HARNESS_CACHE", str(tmp_path_factory.mktemp("harness-cache")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Folder of the embedded checkpoints."""
    return CASES / "checkpoints"


@pytest.fixture(scope="session")
def stories() -> Path:
    """A real model of somebody else's, where it is at hand."""
    if not STORIES.exists():
        pytest.skip("../shared/models/stories260k is not here")
    return STORIES
