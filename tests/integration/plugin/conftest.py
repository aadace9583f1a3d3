"""A project of somebody else's with one small case, for pytest to be run in."""

import json
from pathlib import Path

import pytest

CASE = """\
schema_version = 1
model = {model}
dtype = "float32"
schedules = ["plain", "chunked:4"]
max_new_tokens = 4

[[requests]]
token_ids = [1, 4, 5, 6, 7, 8, 9, 10]
"""

# Other plugins cost seconds a run: the first collects garbage five times, which is slow where torch is loaded.
INI = """\
[pytest]
filterwarnings = error
addopts = -p no:unraisableexception -p no:hypothesispytest -p no:anyio
"""

ROTARY_BROKEN = """\
import pytest

patch = pytest.MonkeyPatch()

def interleaved(x):
    import torch
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

def pytest_collection_finish():  # not in a process that only hands tests to workers
    patch.setattr("reference_engine.rotary.rotate_half", interleaved)

def pytest_unconfigure():
    patch.undo()
"""


@pytest.fixture(scope="session")
def case_text(checkpoints: Path) -> str:
    return CASE.format(model=json.dumps(str(checkpoints / "llama-tiny")))


@pytest.fixture(scope="session")
def plain_case_text(case_text: str) -> str:
    """The case under one schedule: another would only cost time."""
    text = case_text.replace('["plain", "chunked:4"]', '["plain"]')
    assert text != case_text
    return text


@pytest.fixture(scope="session")
def sketch_text(case_text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sketch of the case. Making it fills the cache of goldens, and loads what must outlive pytester's own imports."""
    import torch

    from harness.formats.case import load_case
    from harness.judge.jobs.check import run_check
    from harness.oracle import sketch
    from harness.oracle.make_golden import cached_golden
    from harness.oracle.model import load_model
    from harness.plan import plan_case

    path = tmp_path_factory.mktemp("project") / "tiny.toml"
    path.write_text(case_text)
    plan = plan_case(load_case(path))
    run_check(plan)
    sketch.update(path, cached_golden(load_model(plan.folder, dtype=torch.float32), plan.prompts))
    return sketch.sketch_path(path).read_text()


@pytest.fixture
def project(
    pytester: pytest.Pytester, case_text: str, sketch_text: str, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """A project whose `cases/tiny.toml` passes; a warning in it is an error."""
    for name in ("CI", "BUILD_NUMBER", "HARNESS_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeini(INI)
    cases = pytester.mkdir("cases")
    (cases / "tiny.toml").write_text(case_text)
    (cases / "sketches").mkdir()
    (cases / "sketches" / "tiny.json").write_text(sketch_text)
    return pytester


@pytest.fixture
def broken_project(project: pytest.Pytester) -> pytest.Pytester:
    """The same project where the engine under test pairs the wrong halves in its rotary embedding."""
    project.makeconftest(ROTARY_BROKEN)
    return project
