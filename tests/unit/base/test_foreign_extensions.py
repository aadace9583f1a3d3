"""What another package brings cannot replace a part of the harness, and a broken package is named."""

import sys
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path

import pytest

from harness.base import plugins
from harness.cli.main import commands, run
from harness.errors import Code, HarnessError
from harness.formats.case import RequestSpec
from harness.formats.checkpoint import resolve
from harness.formats.checkpoint.locate import Reader, embedded_model
from harness.formats.checkpoint.quantised import QuantisedSource
from harness.formats.taps import Kind
from harness.judge.compare.conventions import all_conventions
from harness.judge.explain.causes import stages_of
from harness.plan import plan_request

COMMAND = """
from harness.command.entry import CommandEntry, Panel
ENTRY = CommandEntry(name={name!r}, panel={panel!r}, help="Pass.", target="foreign:{function}")
def succeed() -> int:
    return 0
"""
READER = """
from pathlib import Path
from harness.formats.checkpoint.locate import Reader
class Foreign(Reader):
    def reads(self, path):
        return {reads}
    def convert(self, path, origin=None):
        return {folder}
ENTRY = Foreign()
"""


def refused(problem, call, *arguments):
    with pytest.raises(HarnessError) as caught:
        call(*arguments)
    assert caught.value.code is Code.EXTENSION_FAILED
    assert problem in caught.value.what


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Install a package with one module, `foreign`, beside what is installed."""
    added = []

    def clear():
        plugins._by_name.cache_clear()
        all_conventions.cache_clear()

    def install_module(group, name, source, value="foreign:ENTRY"):
        (tmp_path / "foreign.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        added.append(EntryPoint(name, value, group))

        def installed(group):
            return EntryPoints([*entry_points(group=group), *(point for point in added if point.group == group)])

        monkeypatch.setattr(plugins, "entry_points", installed)
        monkeypatch.delitem(sys.modules, "foreign", raising=False)
        clear()

    yield install_module
    sys.modules.pop("foreign", None)
    clear()


@pytest.mark.parametrize(
    ("entry", "name", "panel", "problem"),
    [
        ("check", "check", "Others", "the extension 'check' has the name of a command of the harness"),
        ("other", "check", "Others", "the extension 'other' calls its command 'check': the names must be equal"),
        ("other", "--help", "Others", "the extension 'other' cannot be imported: ValueError: '--help' is no name"),
        ("other", "other", "Mine", "the extension 'other' cannot be imported: ValueError: 'Mine' is not a valid Panel"),
    ],
)
def test_a_command_cannot_replace_one_of_the_harness(install, entry, name, panel, problem):
    install(plugins.COMMANDS, entry, COMMAND.format(name=name, panel=panel, function="succeed"))
    refused(problem, commands)


def test_what_is_no_command_is_refused(install):
    install(plugins.COMMANDS, "other", "ENTRY = 3")
    refused("the extension 'other' names no CommandEntry, but int", commands)


def test_a_command_whose_function_is_missing_is_no_bug_of_the_harness(install, capsys):
    install(plugins.COMMANDS, "other", COMMAND.format(name="other", panel="Others", function="missing"))
    assert run(["other"]) == 2
    assert "H124: the extension 'other' cannot be imported: AttributeError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reads", "folder", "problem"),
    [
        ("1 / 0", "path", "the extension 'other' failed: ZeroDivisionError: division by zero"),
        ("True", "1 / 0", "the extension 'other' failed: ZeroDivisionError: division by zero"),
        ("True", "'text'", "to no folder with a config.json: 'text'"),
        ("True", "Path('nowhere')", "to no folder with a config.json: PosixPath('nowhere')"),
    ],
)
def test_a_reader_that_fails_is_no_bug_of_the_harness(install, reads, folder, problem):
    install(plugins.READERS, "other", READER.format(reads=reads, folder=folder))
    refused(problem, resolve, embedded_model())


def test_a_check_says_whose_reader_made_the_weights(install):
    plan = plan_request(model=embedded_model(), requests=[RequestSpec(token_ids=[1, 2])], schedules=["plain"])
    assert plan.notes == ()
    install(plugins.READERS, "other", READER.format(reads="True", folder="path"))
    plan = plan_request(model=embedded_model(), requests=[RequestSpec(token_ids=[1, 2])], schedules=["plain"])
    (note,) = plan.notes
    assert note == f"the weights are those that the reader 'other' of another package makes of {embedded_model()}"


def test_a_reader_of_quantised_checkpoints_has_to_open_them(install):
    install(plugins.READERS, "other", READER.format(reads=True, folder="path"))
    source = QuantisedSource(reader="other", path=Path("model"), formats=("int4",), modules=("lm_head",), made="made")
    refused("the extension 'other' read model as quantised, and has no open_source", source.open)


def test_what_is_no_reader_is_refused(install):
    install(plugins.READERS, "other", "ENTRY = None")
    refused("the extension 'other' names no Reader, but NoneType", resolve, embedded_model())


def test_a_reader_cannot_take_the_path_of_another_one(install):
    for name in ("another", "other"):
        install(plugins.READERS, name, READER.format(reads="True", folder="path"))
    refused("is not the only one that reads", resolve, embedded_model())


@pytest.mark.parametrize("source", ["", "CONVENTIONS = 3", "CONVENTIONS = [3]"])
def test_a_module_without_conventions_is_refused(install, source):
    install(plugins.CONVENTIONS, "other", source, "foreign")
    refused("the extension 'other' has no CONVENTIONS", all_conventions)


@pytest.mark.parametrize("source", ["", "EXPLANATIONS = [3]", "EXPLANATIONS = {'linear': []}"])
def test_a_module_without_explanations_is_refused(install, source):
    install(plugins.EXPLANATIONS, "other", source, "foreign")
    refused("the extension 'other' has no EXPLANATIONS", stages_of, Kind.LINEAR)


def test_an_extension_that_the_core_asks_for_and_nobody_brings_is_an_error():
    refused("no extension is called 'missing'", plugins.load, plugins.READERS, "missing", Reader)
