"""Under xdist: goldens are shared through the cache, and workers' failures look like everybody's."""

from xml.etree import ElementTree

import pytest

pytest_plugins = ["pytester"]


@pytest.mark.slow
def test_two_workers_on_an_empty_cache(
    broken_project: pytest.Pytester, plain_case_text: str, sketch_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers want the same golden at once; the engine is wrong in both; their reports come back whole."""
    cache = broken_project.mkdir("cache")
    monkeypatch.setenv("HARNESS_CACHE", str(cache))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("CI", "false")
    for name in ("tiny", "twin"):
        (broken_project.path / "cases" / f"{name}.toml").write_text(plain_case_text)
    result = broken_project.runpytest_subprocess(
        "-n2", "--golden-update", "--color=yes", "--junitxml=junit.xml", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert text.count("\x1b[1;31m▸") == 2
    assert text.count(" - H040: model.layers.0.q_rope, request 0") == 2
    assert text.count("First divergence:") == 2
    result.stdout.fnmatch_lines(
        [
            "*operation*p99*worst row*verdict*",
            "*= golden update =*",
            "cases/tiny.toml: unchanged*",
            "cases/twin.toml: new sketch*",
        ]
    )
    assert len(list((cache / "goldens").iterdir())) == 1
    assert (broken_project.path / "cases" / "sketches" / "twin.json").read_text() == sketch_text
    root = ElementTree.parse(broken_project.path / "junit.xml").getroot()
    values = [entry.attrib["value"] for entry in root.iter("property") if entry.attrib["name"] == "verdict"]
    assert values == ["mismatch", "mismatch"]
