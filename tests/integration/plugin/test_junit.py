"""--junitxml: the figures of every case, and a failure that reads in a browser."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest_plugins = ["pytester"]


def read(path: Path) -> tuple[ElementTree.Element, dict[str, str]]:
    case = ElementTree.parse(path / "junit.xml").getroot().find(".//testcase")
    assert case is not None
    return case, {entry.attrib["name"]: entry.attrib["value"] for entry in case.iter("property")}


def test_a_passing_case_carries_its_figures(project: pytest.Pytester) -> None:
    project.runpytest("--junitxml=junit.xml")
    case, properties = read(project.path)
    assert (case.attrib["classname"], case.attrib["name"]) == ("cases.tiny.toml", "check")
    assert properties["verdict"] == "pass"
    assert properties["schedules"] == "plain chunked:4"
    assert properties["num_rows"] == "22"
    assert properties["tokens_equal"] == properties["tokens_compared"] == "8"
    assert 0 < float(properties["roundings_max.linear"]) < 100


@pytest.mark.sampled(1)
@pytest.mark.parametrize("color", ["no", "yes"])
def test_a_failing_case_carries_its_figures_and_its_text(broken_project: pytest.Pytester, color: str) -> None:
    broken_project.runpytest("--junitxml=junit.xml", f"--color={color}")
    case, properties = read(broken_project.path)
    assert properties["verdict"] == "mismatch"
    assert properties["first_divergence"].startswith("model.layers.0.q_rope: request 0")
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib["message"].startswith("H040: model.layers.0.q_rope")
    assert "First divergence: model.layers.0.q_rope" in str(failure.text)
    assert "x1B" not in str(failure.text)
