"""What a failed case prints: the table and the culprit, or the message of the error, and none of pytest's traceback."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


def test_a_broken_engine_shows_the_table_and_the_culprit(broken_project: pytest.Pytester) -> None:
    result = broken_project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*___ cases/tiny.toml ___*",
            "MISMATCH*reference*llama-tiny*float32*cpu*",
            "First divergence: model.layers.0.q_rope*",
            "*request 0, position *, schedule plain*",
            "*operation*median*verdict*",
            "▸*q_rope*bug*",
            "FAILED cases/tiny.toml::check - H040: model.layers.0.q_rope*",
        ]
    )
    for trace in ("*Traceback*", "*CheckFailedError*", "*.py:*", "E  *"):
        result.stdout.no_fnmatch_line(trace)


@pytest.mark.slow
def test_the_line_of_the_summary_names_the_schedule(
    broken_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = broken_project.runpytest("--tb=no")
    result.stdout.fnmatch_lines(["FAILED cases/tiny.toml::check - H040: *q_rope, request 0, *, schedule plain"])
    result.stdout.no_fnmatch_line("*operation*")


@pytest.mark.slow
def test_in_continuous_integration_the_summary_stays_one_line(
    broken_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    result = broken_project.runpytest()
    assert result.stdout.str().count("First divergence:") == 1


@pytest.mark.slow
def test_a_wide_terminal_gets_more_columns(broken_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    broken_project.runpytest().stdout.no_fnmatch_line("*worst row*")
    monkeypatch.setenv("COLUMNS", "160")
    broken_project.runpytest().stdout.fnmatch_lines(["*operation*p99*worst row*verdict*"])


@pytest.mark.slow
def test_colour_as_pytest_does(broken_project: pytest.Pytester) -> None:
    assert "\x1b[1;31m▸" in broken_project.runpytest("--color=yes").stdout.str()
    assert "\x1b" not in broken_project.runpytest("--color=no").stdout.str()


def test_a_trigger_that_was_not_reached_fails_and_says_so(project: pytest.Pytester, case_text: str) -> None:
    (project.path / "cases" / "tiny.toml").write_text('require = ["block_boundary"]\n' + case_text)
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*H050*KV block*", "FAILED cases/tiny.toml::check - H050: *"])


def test_an_error_shows_its_message_only(project: pytest.Pytester, case_text: str) -> None:
    (project.path / "cases" / "tiny.toml").write_text(case_text.replace("[1, 4,", "[1, 999999,"))
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["H010: token id 999999*", "  where:*", "FAILED cases/tiny.toml::check - H010: *"])
    result.stdout.no_fnmatch_line("*.py:*")


def test_the_traceback_is_there_for_who_asks(
    project: pytest.Pytester, case_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_TRACEBACK", "1")
    (project.path / "cases" / "tiny.toml").write_text(case_text.replace("[1, 4,", "[1, 999999,"))
    result = project.runpytest()
    result.stdout.fnmatch_lines(["*items.py:*in runtest*", "*golden.py:*", "E*H010: token id 999999*"])
    result.stdout.no_fnmatch_line("*/pluggy/*")


def test_a_case_for_a_device_that_is_not_there_is_skipped(
    project: pytest.Pytester, case_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (project.path / "cases" / "tiny.toml").write_text('device = "cuda"\n' + case_text)
    result = project.runpytest("-ra")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*cases/tiny.toml: H016: *cuda*"])


def test_a_missing_checkpoint_is_an_error_of_the_case(project: pytest.Pytester, tmp_path: Path) -> None:
    case = project.path / "cases" / "tiny.toml"
    case.write_text("schema_version = 1\nmodel = 'nowhere/at/all'\n[[requests]]\ntoken_ids = [1]\n")
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["H001: *"])
