"""One public class of a name in all packages: a name then says which thing it is, wherever it stands."""

import ast
from collections import defaultdict
from pathlib import Path

import harness
import reference_engine

PACKAGES = [Path(package.__file__).parent for package in (harness, reference_engine)]


def test_no_two_public_classes_have_one_name():
    places = defaultdict(list)
    for file in (file for package in PACKAGES for file in package.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
