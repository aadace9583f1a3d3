"""Names that say nothing: what is called so gets a name that says what it is."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {"own", "each", "found", "given", "other"}
DIALECT = {"befores", "beyond", "freedom", "is_any", "is_oftener", "parted", "refuse_silence", "scene", "untold"}
MAY_NAME = re.compile(rf"\b_*({'|'.join(NAMES | DIALECT)})_*(?= *([=:,)(\]\[|]|in\b|$))", re.IGNORECASE | re.MULTILINE)
"""What a file has that names something so: the others need not be parsed."""
ROOMS = ("harness", "reference_engine", "cases", "tests", "reports", "docs")


def named(tree):
    """Yield the names that a module gives to all but the members of an enum: "other" is one of its categories."""
    members = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Enum") for base in node.bases):
            members |= {id(target) for line in node.body if isinstance(line, ast.Assign) for target in line.targets}
        if id(node) in members:
            continue
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield name, node.lineno
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno


def bad_names(source):
    if not MAY_NAME.search(source):
        return []
    return [(name, line) for name, line in named(ast.parse(source)) if name.strip("_").lower() in NAMES | DIALECT]


@pytest.mark.parametrize("room", ROOMS)
def test_a_name_says_what_a_thing_is(room):
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for name, line in bad_names(path.read_text(encoding="utf-8"))
    ]
    assert bad == []


@pytest.mark.parametrize(
    "source",
    [
        "own = 1",
        "self._found: dict = {}",
        "[each for each in rows]",
        "f = lambda *_given: None",
        "async def _other(): ...",
        "class Scene: ...",
        "OTHER = 1",
        "import rows as found",
        "try: ...\nexcept ValueError as other: ...",
        "match row:\n    case [given, *own]: ...",
    ],
)
def test_each_kind_of_name_is_seen(source):
    assert bad_names(source)


def test_a_category_of_an_enum_may_be_other():
    assert not bad_names("class Kind(StrEnum):\n    OTHER = 'other'")
    assert bad_names("class Kind:\n    OTHER = 'other'")
