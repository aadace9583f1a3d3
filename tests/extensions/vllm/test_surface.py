"""What the adapter touches of vLLM is all there: in the vLLM that is installed, or in the source that a variable names.

pip download vllm==0.33.0 --no-deps && unzip vllm-*.whl -d SOURCE
HARNESS_VLLM_SOURCE=SOURCE/vllm pytest tests/extensions/vllm/test_surface.py
"""

import ast
import os
from pathlib import Path

import pytest

from harness.extensions import vllm

from .surface import SURFACE, installed_source, missing_names

VARIABLE = "HARNESS_VLLM_SOURCE"
ADAPTER = sorted(Path(vllm.__file__).parent.glob("*.py"))


def test_a_vllm_has_all_names_that_the_adapter_touches():
    source = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else installed_source()
    if source is None:
        pytest.skip(f"vLLM is not installed, and {VARIABLE} names no folder of its package")
    assert missing_names(source) == []


def nodes_of_the_adapter(kind):
    return [node for path in ADAPTER for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kind)]


def test_the_surface_has_all_that_the_adapter_imports():
    imports = [node for node in nodes_of_the_adapter(ast.ImportFrom) if (node.module or "").partition(".")[0] == "vllm"]
    assert len(imports) > 5
    for node in imports:
        assert {alias.name for alias in node.names} <= set(SURFACE[node.module.partition(".")[2]])


@pytest.mark.parametrize("variable", ["arguments", "limits"])
def test_the_surface_has_the_fields_that_an_engine_is_opened_with(variable):
    dicts = [
        node.value
        for node in nodes_of_the_adapter((ast.Assign, ast.AnnAssign, ast.AugAssign))
        if isinstance(node.value, ast.Dict) and ast.unparse(node).startswith(variable)
    ]
    names = {key.value for item in dicts for key in item.keys if isinstance(key, ast.Constant)}
    assert len(names) > 2
    assert names <= set(SURFACE["engine.arg_utils:EngineArgs"])


def test_the_surface_has_what_requests_are_given():
    calls = [node for node in nodes_of_the_adapter(ast.Call) if ast.unparse(node.func) == "SamplingParams"]
    names = {keyword.arg for call in calls for keyword in call.keywords}
    assert names == set(SURFACE["sampling_params:SamplingParams"])


TOY = """
import os
from vllm.base import Base
if os.name:
    LIMIT = 3
class Runner(Base[int]):
    window: int
    def __init__(self):
        self.tables = []
        os.elsewhere = 1
    def step(self): ...
"""
BASE = """
class Base:
    @property
    def dtype(self): ...
"""


@pytest.mark.parametrize(
    ("place", "name", "says"),
    [
        ("toy", "LIMIT", None),
        ("toy", "Base", None),
        ("toy", "Walker", "vllm.toy has no Walker"),
        ("toy:Runner", "step", None),
        ("toy:Runner", "window", None),
        ("toy:Runner", "tables", None),
        ("toy:Runner", "dtype", None),
        ("toy:Runner", "elsewhere", "vllm.toy.Runner has no elsewhere"),
        ("toy:Walker", "step", "there is no class vllm.toy.Walker, of which the adapter needs step"),
        ("away", "step", "there is no module vllm.away, of which the adapter needs step"),
        ("away:Runner", "step", "there is no module vllm.away, of which the adapter needs Runner, step"),
    ],
)
def test_what_a_source_lacks_is_said(tmp_path, place, name, says):
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "base.py").write_text(BASE)
    assert missing_names(tmp_path, {place: (name,)}) == ([] if says is None else [says])
