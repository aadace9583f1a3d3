"""What entry points name is imported when it is used, and a package that is broken is an error of its own."""

import math
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from harness.base import plugins
from harness.errors import Code, HarnessError

GROUP = "inference_harness.tests"


@pytest.fixture
def install(monkeypatch):
    """Install entry points of a group in the place of those that are there."""

    def install_entries(**values):
        points = EntryPoints(
            EntryPoint(name.rstrip("_"), value, GROUP) for name, value in values.items()
        )  # a name with an underscore at its end is the same name again
        monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == GROUP else ())
        plugins._by_name.cache_clear()

    yield install_entries
    plugins._by_name.cache_clear()


def test_objects_come_in_the_order_of_their_names(install):
    install(two="math:tau", one="math:pi")
    assert list(plugins.load_all(GROUP, float).items()) == [("one", math.pi), ("two", math.tau)]


def refuse_all(_loaded):
    raise TypeError("is of no use")


@pytest.mark.parametrize(("check", "problem"), [(str, "names no str, but float"), (refuse_all, "is of no use")])
def test_an_object_that_does_not_pass_the_check_is_refused(install, check, problem):
    install(one="math:pi")
    with pytest.raises(HarnessError, match=f"the extension 'one' {problem}") as caught:
        plugins.load_all(GROUP, check)
    assert caught.value.code is Code.EXTENSION_FAILED


@pytest.mark.parametrize("value", ["no_such_module:x", "math:no_such_name"])
def test_what_cannot_be_imported_is_said(install, value):
    install(broken=value)
    with pytest.raises(HarnessError, match="the extension 'broken' cannot be imported") as caught:
        plugins.load(GROUP, "broken", float)
    assert caught.value.code is Code.EXTENSION_FAILED
    assert value in str(caught.value)


def test_two_packages_that_bring_one_name_are_refused(install):
    install(one="math:pi", one_="math:tau")
    assert plugins.names(GROUP) == ["one"]
    with pytest.raises(HarnessError, match="several extensions are called 'one'") as caught:
        plugins.load_all(GROUP, float)
    assert caught.value.code is Code.EXTENSION_FAILED


def test_an_error_of_the_harness_stays_what_it_is(install, monkeypatch):
    refusal = HarnessError(Code.NO_HYPOTHESIS, "needs Hypothesis", where="here")

    def load(entry):
        raise refusal

    install(one="math:pi")
    monkeypatch.setattr(EntryPoint, "load", load)
    with pytest.raises(HarnessError) as caught:
        plugins.load(GROUP, "one", float)
    assert caught.value is refusal


def test_a_package_on_a_path_that_is_added_later_is_found(monkeypatch, tmp_path):
    assert plugins.names(GROUP) == []
    metadata = tmp_path / "later-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nlater = math:pi\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.load(GROUP, "later", float) == math.pi
