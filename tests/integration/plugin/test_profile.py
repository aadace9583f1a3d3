"""A case with `[profile]`: captures beside the JUnit file, and what the engine needs held to a baseline."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest_plugins = ["pytester"]

PROFILE = """
[profile]
prompt_tokens = 6
max_new_tokens = 4
phases = ["decode"]
"""


@pytest.fixture
def profiled(project: pytest.Pytester, plain_case_text: str) -> pytest.Pytester:
    """The project, its case with a profile and a baseline."""
    case = project.path / "cases" / "tiny.toml"
    case.write_text(f'{plain_case_text}{PROFILE}baseline = "baselines/tiny.json"\n')
    return project


def captures(project: pytest.Pytester) -> Path:
    return project.path / "out" / "captures" / "cases" / "tiny"


@pytest.mark.slow
def test_captures_and_baseline(profiled: pytest.Pytester) -> None:
    """From the first run to a regression: each step needs the one before, and a profile takes seconds."""
    baseline = profiled.path / "cases" / "baselines" / "tiny.json"

    missing = profiled.runpytest("--junitxml=out/junit.xml")
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["H075: there is no baseline", "*pytest cases/tiny.toml --baseline-update*"])
    properties = {
        entry.attrib["name"]: entry.attrib["value"]
        for entry in ElementTree.parse(profiled.path / "out" / "junit.xml").iter("property")
    }
    assert properties["verdict"] == "pass"
    assert float(properties["tpot_ms"]) > 0
    assert properties["captures"] == str(captures(profiled))
    document = json.loads((captures(profiled) / "profile.json").read_text())
    (phase,) = document["phases"]
    assert all((captures(profiled) / phase[name]).is_file() for name in ("trace", "snapshot"))
    page = (captures(profiled) / document["report"]).read_text()
    assert "What was checked" in page
    assert phase["trace"] in page
    assert sorted(path.name for path in captures(profiled).parent.iterdir()) == ["tiny"]

    updated = profiled.runpytest("--baseline-update", "--captures=elsewhere")
    updated.assert_outcomes(passed=1)
    updated.stdout.fnmatch_lines(["*= baseline update =*", "cases/tiny.toml: ACCEPTED*"])
    assert (profiled.path / "elsewhere" / "cases" / "tiny" / "report.html").is_file()

    stored = json.loads(baseline.read_text())
    stored["entries"][0]["phases"]["decode"]["operators"]["attention"]["aten::add"] = 1
    operators = stored["entries"][0]["phases"]["decode"]["operators"]["self_attn.q_proj"]
    name = next(iter(operators))
    operators[name] -= 1
    baseline.write_text(json.dumps(stored))
    worse = profiled.runpytest()
    worse.assert_outcomes(failed=1)
    worse.stdout.fnmatch_lines(
        [
            f"*decode*self_attn.q_proj*{name}*H078*",
            "if this is meant: pytest cases/tiny.toml --baseline-update",
            "FAILED cases/tiny.toml::check - H078: decode self_attn*",
        ]
    )
    assert not list(profiled.path.glob("cases/captures"))


@pytest.mark.slow
def test_a_profile_without_a_baseline_says_that_nothing_was_compared(
    project: pytest.Pytester, plain_case_text: str
) -> None:
    (project.path / "cases" / "tiny.toml").write_text(plain_case_text + PROFILE)
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    what = "its profile was compared with nothing: [[]profile] names no baseline"
    result.stdout.fnmatch_lines(["*= not compared =*", f"cases/tiny.toml: {what}"])


@pytest.mark.slow
def test_an_engine_that_is_wrong_is_not_profiled(broken_project: pytest.Pytester) -> None:
    case = broken_project.path / "cases" / "tiny.toml"
    case.write_text(case.read_text() + PROFILE)
    broken_project.runpytest("--junitxml=out/junit.xml").assert_outcomes(failed=1)
    assert not captures(broken_project).exists()


def test_updating_is_refused_in_continuous_integration(
    profiled: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    result = profiled.runpytest("--baseline-update")
    result.stderr.fnmatch_lines(["*H034: --baseline-update is refused where CI is set*"])
