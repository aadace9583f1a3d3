"""`make test-oldest` installs what pyproject.toml says is enough; `make lock` writes what a fresh environment gets."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def bounds(requirements: list[str], operator: str) -> dict[str, str]:
    """The version that each package is given with an operator."""
    parsed = (Requirement(requirement) for requirement in requirements)
    return {
        re.sub("[-_]", "-", requirement.name): next(
            part.version for part in requirement.specifier if part.operator == operator
        )
        for requirement in parsed
        if requirement.specifier
    }


def test_every_lower_bound_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    stated = bounds([*project["dependencies"], *extras["test"], *extras["serve"]], ">=")
    lines = (ROOT / "tests" / "oldest.txt").read_text().splitlines()
    installed = bounds([line for line in lines if not line.startswith("#")], "==")
    assert stated.keys() == installed.keys()
    for name, version in stated.items():
        assert re.fullmatch(rf"{re.escape(version)}(\.0)*|{re.escape(version)}\.\d+", installed[name]), name


def test_the_versions_that_are_audited_are_those_of_every_package_that_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["serve"], *extras["test"], *extras["dev"]]
    lines = (ROOT / "tests" / "newest.txt").read_text().splitlines()
    locked = {name.lower(): version for name, version in bounds(lines[1:], "==").items()}
    for requirement in map(Requirement, asked):
        name = re.sub("[-_]", "-", requirement.name)
        assert name == "inference-harness" or requirement.specifier.contains(locked[name]), requirement
