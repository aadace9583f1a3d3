"""`make test-machines`: the settings, what they hide, and the table of what failed."""

import datetime
import os
import re
import shutil
import subprocess
import sys

import psutil
import pytest

from ..machines import (
    COMPILERS,
    ROOT,
    SETTINGS,
    Setting,
    environment_of,
    kept_results,
    load_of,
    missing,
    path_without,
    run_suite,
    setting_of_the_day,
    table,
)

NO_PLUGINS = ("-n", "0", "-p", "no:cacheprovider")


def pytest_output(command: list[str]) -> str:
    """Run pytest from the repository's root; return what it printed."""
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_names_are_unique_and_each_setting_changes_something_else():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    plain = Setting(name="")
    changed = [repr(setting).replace(setting.name, "", 1) for setting in SETTINGS]
    assert len(set(changed)) == len(changed)
    assert changed.count(repr(plain)) == 1, "the plain run"


def test_each_day_has_a_setting_and_the_days_take_turns():
    days = [datetime.date(2026, 1, 1) + datetime.timedelta(days=n) for n in range(len(SETTINGS))]
    chosen = [setting_of_the_day(day) for day in days]
    there = {setting.name for setting in SETTINGS if setting.is_daily and not missing(setting)} - {"plain"}
    assert {item.name for item in chosen} == there


def test_a_setting_that_cannot_be_made_says_what_is_missing(tmp_path):
    setting = Setting(name="x", packages=("no_such_package",), programs=("no-such",), processor_flag="no_such_flag")
    lacks = ["package no_such_package", "program no-such", "processor with no_such_flag"]
    assert missing(setting) == lacks
    result = run_suite(setting, [], tmp_path)
    assert not result.is_green
    assert "not run: no package no_such_package, no program no-such, no processor with no_such_flag" in table([result])


def test_a_hidden_package_is_not_there_in_any_process(tmp_path):
    environment = environment_of(Setting(name="x", hidden_packages=("tabulate", "gguf")), tmp_path)
    program = """if True:
        import importlib.machinery, importlib.util, json, subprocess, sys
        assert importlib.util.find_spec("tabulate") is None
        class LikePytest:  # its hook keeps the finder in a class of its own
            find = importlib.machinery.PathFinder.find_spec
        assert LikePytest().find("json") and not LikePytest().find("tabulate")
        try:
            import tabulate
        except ModuleNotFoundError as error:
            print(error)
        if len(sys.argv) == 1:
            subprocess.run([sys.executable, "-c", open(0).read(), "again"], check=True)
    """
    ran = subprocess.run(
        [sys.executable, "-c", program], input=program, capture_output=True, text=True, env=environment
    )
    assert (ran.returncode, ran.stdout) == (0, "No module named 'tabulate'\n" * 2), ran.stderr


def test_hidden_programs_are_not_on_the_path_and_others_are(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, names in ((first, ("g++", "x86_64-linux-gnu-gcc-12", "cc", "git")), (second, ("other",))):
        folder.mkdir()
        for name in names:
            (folder / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(first), str(second), str(first), str(tmp_path / "nowhere")]))
    monkeypatch.setenv("CXX", "g++")
    environment = environment_of(Setting(name="x", hidden_programs=COMPILERS), tmp_path)
    path = environment["PATH"]
    assert path.split(os.pathsep)[1:] == [str(second), str(tmp_path / "nowhere")], "as it was"
    assert shutil.which("git", path=path) == str(tmp_path / "path-0" / "git")
    assert not any(shutil.which(name, path=path) for name in ("g++", "cc", "x86_64-linux-gnu-gcc-12"))
    assert "CXX" not in environment
    assert path_without((), tmp_path) == os.pathsep.join([str(first), str(second), str(tmp_path / "nowhere")])


def test_a_load_is_there_and_ends():
    before = set(psutil.Process().children())
    with load_of(2):
        busy = set(psutil.Process().children()) - before
        assert len(busy) == 2
    assert not any(process.is_running() for process in busy)


def test_a_run_counts_what_passed_failed_and_was_skipped(tmp_path):
    (tmp_path / "test_it.py").write_text("""if True:
        import os, pytest
        @pytest.mark.parametrize("n", range(3))
        def test_passes(n): assert os.environ["OTHER"] == "machine"
        def test_fails(): assert False
        def test_is_skipped(): pytest.skip("no reason")
        @pytest.fixture
        def broken(): raise ValueError
        def test_has_no_fixture(broken): pass
    """)
    setting = Setting(name="load-20", environment={"OTHER": "machine"}, num_busy_processes=1)
    result = run_suite(setting, [str(tmp_path / "test_it.py"), *NO_PLUGINS], tmp_path)
    assert (result.passed, result.skipped, result.status, result.is_green) == (3, 1, 1, False)
    assert [name.rpartition("::")[2] for name in result.failed] == ["test_fails", "test_has_no_fixture"]
    assert "1 failed, 3 passed, 1 skipped, 1 error" in (tmp_path / "load-20.log").read_text()
    heading, _, row, _, *failed = table([result]).splitlines()
    told = dict(zip(*([cell.strip() for cell in line.split("|")[1:-1]] for line in (heading, row)), strict=True))
    assert {key: told[key] for key in ("setting", "passed", "skipped", "failed", "status of pytest")} == {
        "setting": "load-20", "passed": "3", "skipped": "1", "failed": "2", "status of pytest": "1",
    }  # fmt: skip
    assert failed == [f"- load-20: {name}" for name in result.failed]


def test_a_run_that_ends_before_its_report_is_not_green(tmp_path):
    result = run_suite(Setting(name="plain"), ["--no-such-option"], tmp_path)
    assert (result.passed, result.status, result.is_green) == (0, 4, False)


def test_results_of_other_runs_stay_in_the_table(tmp_path):
    assert kept_results(tmp_path) == []
    (tmp_path / "threads-3.json").write_text('{"setting": "threads-3", "passed": 7, "failed": ["a"]}')
    (tmp_path / "plain.json").write_text('{"setting": "plain", "passed": 7}')
    assert [result.setting for result in kept_results(tmp_path)] == ["plain", "threads-3"]


def test_the_default_run_is_not_shuffled(tmp_path):
    names = [f"test_{n:02}" for n in range(30)]
    (tmp_path / "test_it.py").write_text("".join(f"def {name}(): pass\n" for name in names))
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *NO_PLUGINS, str(tmp_path / "test_it.py")]
    shuffled = "--random-order-bucket=module", "--random-order-seed=1"
    outputs = [pytest_output([*command, *more]) for more in ((), shuffled)]
    assert [re.findall(r"test_\d+", item) for item in outputs[:1]] == [names]
    assert sorted(re.findall(r"test_\d+", outputs[1])) == names != re.findall(r"test_\d+", outputs[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "setting",
    [
        item
        for item in SETTINGS
        if {"-p", "--random-order-bucket=module", "--random-order-bucket=package"} & {*item.arguments}
    ],
    ids=lambda setting: setting.name,
)
def test_pytest_knows_the_arguments_of_a_setting(setting, tmp_path):
    (tmp_path / "test_it.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", str(tmp_path / "test_it.py"), *setting.arguments, *NO_PLUGINS]
    assert "2 passed" in pytest_output(command)
