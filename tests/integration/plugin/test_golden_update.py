"""--golden-update, and the sketches it writes: missing, changed, damaged, refused in continuous integration."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def sketch_file(project: pytest.Pytester) -> Path:
    return project.path / "cases" / "sketches" / "tiny.json"


def change(sketch_file: Path, tap: str, factor: float) -> None:
    document = json.loads(sketch_file.read_text())
    document["taps"][tap]["norm"] *= factor
    sketch_file.write_text(json.dumps(document))


def test_a_missing_sketch_fails_and_names_the_command(project: pytest.Pytester, sketch_file: Path) -> None:
    sketch_file.unlink()
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["H032: the golden's sketch is missing", "*sketches/tiny.json", "*pytest cases/tiny.toml --golden-update"]
    )
    assert not sketch_file.exists()


def test_update_makes_a_missing_sketch(project: pytest.Pytester, sketch_file: Path, sketch_text: str) -> None:
    sketch_file.unlink()
    sketch_file.parent.rmdir()
    result = project.runpytest("--golden-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*= golden update =*", "cases/tiny.toml: new sketch of 48 taps"])
    assert sketch_file.read_text() == sketch_text
    assert [path.name for path in sketch_file.parent.iterdir()] == ["tiny.json"]


def test_a_sketch_that_differs_fails_and_names_the_first_tap(project: pytest.Pytester, sketch_file: Path) -> None:
    change(sketch_file, "model.layers.1.output", 1.00001)
    change(sketch_file, "model.norm", 2.0)
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "H033: the golden differs from its sketch",
            "*sketches/tiny.json: model.layers.1.output",
            "*expected: 11 rows of norm*",
            "*actual: *11 rows of norm*",
            "*pytest cases/tiny.toml --golden-update",
        ]
    )


def test_a_change_within_tolerance_is_none(project: pytest.Pytester, sketch_file: Path) -> None:
    change(sketch_file, "model.norm", 1 + 1e-8)
    before = sketch_file.read_text()
    result = project.runpytest("--golden-update")
    result.stdout.fnmatch_lines(["cases/tiny.toml: unchanged (largest change 1e-08 of the row norm)"])
    assert sketch_file.read_text() == before


def test_update_shows_the_numeric_change(
    project: pytest.Pytester, sketch_file: Path, sketch_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(sketch_text)
    document["requests"][0]["token_ids"][9] = 200
    document["taps"]["model.norm"]["norm"] *= 1 / 1.25
    del document["taps"]["lm_head"]
    sketch_file.write_text(json.dumps(document))
    result = project.runpytest("--golden-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "cases/tiny.toml: tokens changed: 1, taps moved: 2 of 48",
            "  request 0, token 9: 200 -> *",
            "  0.25 *model.norm: 11 rows of norm * -> 11 rows of norm *",
            "  inf *lm_head: absent -> 4 rows of norm *",
        ]
    )
    assert sketch_file.read_text() == sketch_text


def test_a_damaged_sketch_fails_and_update_replaces_it(
    project: pytest.Pytester, sketch_file: Path, sketch_text: str
) -> None:
    sketch_file.write_text("<<<<<<< HEAD\n" + sketch_text)
    project.runpytest().stdout.fnmatch_lines(["H018: the golden's sketch cannot be read: *"])
    project.runpytest("--golden-update").assert_outcomes(passed=1)
    assert sketch_file.read_text() == sketch_text


@pytest.mark.slow
def test_a_wrong_engine_still_fails_under_update(broken_project: pytest.Pytester) -> None:
    result = broken_project.runpytest("--golden-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["First divergence: *", "cases/tiny.toml: unchanged *"])


@pytest.mark.parametrize("value", ["true", "1", "yes"])
def test_update_is_refused_in_continuous_integration(
    project: pytest.Pytester, sketch_file: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("CI", value)
    sketch_file.unlink()
    result = project.runpytest("--golden-update")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: H034: --golden-update is refused where CI is set", f"*actual: *{value}"])
    assert not sketch_file.exists()


@pytest.mark.parametrize("value", ["", "false", "False", "0"])
def test_a_ci_variable_that_says_no_refuses_nothing(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("CI", value)
    assert project.runpytest("--golden-update", "--collect-only").ret == 0


def shipped_cases() -> Iterator[Path]:
    return (Path(__file__).parents[3] / "cases").glob("*.toml")


def test_every_shipped_case_has_a_small_sketch_and_every_sketch_a_case() -> None:
    names = {path.stem for path in shipped_cases()}
    sketches = {path.stem: path.stat().st_size for path in (Path(__file__).parents[3] / "cases" / "sketches").iterdir()}
    assert sketches.keys() == names
    assert max(sketches.values()) < 40_000
