"""docs/adapters: short and complete; they run where the engine is installed."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.properties.blocks import adapter as block_manager
from harness.properties.scheduler import adapter as scheduler

FOLDER = Path(__file__).parents[2] / "docs" / "adapters"
ENGINES = {"nano_vllm": "nanovllm", "mini_sglang": "minisgl", "sglang": "sglang", "vllm": "vllm"}
PROTOCOLS = {"blocks": block_manager, "scheduler": scheduler}
FILES = [(engine, name) for engine in ENGINES for name in PROTOCOLS]
MOST_LINES = {"nano_vllm": 60, "mini_sglang": 60, "sglang": 140, "vllm": 85}
OTHERS = {
    Path("vllm", "pool.py"),
    *(Path("nano_vllm", f"{name}.py") for name in ("cpu_attention", "engine")),
    *(Path("sglang", f"{name}.py") for name in ("pool", "cpu", "engine")),
}  # fmt: skip
"""What adapters of the suites import, and adapters of whole engines."""


def test_every_adapter_is_tested_here() -> None:
    assert {path.relative_to(FOLDER) for path in FOLDER.rglob("*.py")} == {
        Path(engine, f"{name}.py") for engine, name in FILES
    } | OTHERS


@pytest.mark.parametrize(("engine", "name"), FILES)
def test_an_adapter_is_short_and_has_what_its_suite_asks_for(engine: str, name: str) -> None:
    text = (FOLDER / engine / f"{name}.py").read_text()
    assert len(text.splitlines()) <= MOST_LINES[engine]
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    methods = {node.name for node in classes["Adapter"].body if isinstance(node, ast.FunctionDef)}
    methods |= {"block_table"} if "from pool import" in text else set()
    assert methods >= set(PROTOCOLS[name].REQUIRED)


@pytest.mark.parametrize(("engine", "name"), FILES)
def test_an_adapter_runs_where_its_engine_is_installed(engine: str, name: str, tmp_path: Path) -> None:
    package = ENGINES[engine]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    option = "--block-manager" if name == "blocks" else "--scheduler"
    command = ["pytest", "-p", "no:cacheprovider", "--pyargs", "harness.properties", option, f"{name}:Adapter"]
    folder = shutil.copytree(FOLDER / engine, tmp_path / engine)
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False)
    # The engine may have bugs; the adapter may not be what raises.
    assert "1 passed" in done.stdout or "H092: " in done.stdout, done.stdout
    assert "raised" not in done.stdout, done.stdout


@pytest.mark.parametrize(("engine", "most_lines"), [("nano_vllm", 160), ("sglang", 200)])
def test_an_adapter_of_a_whole_engine_is_short_and_names_no_tensor(engine: str, most_lines: int) -> None:
    text = (FOLDER / engine / "engine.py").read_text()
    assert len(text.splitlines()) <= most_lines
    assert not {"o_proj", "down_proj", "gate_up_proj", "input_layernorm"} & set(re.findall(r"\w+", text))


def test_nano_vllm_passes_with_every_tap(checkpoints: Path) -> None:
    if importlib.util.find_spec("nanovllm") is None:
        pytest.skip("nanovllm is not installed")
    program = f"""
from pathlib import Path
import harness
from engine import open_engine

folder = Path({str(checkpoints / "qwen3-tiny")!r})
engine = open_engine(folder, dtype="bfloat16", device="cpu", options={{}})
result = harness.check(engine, model=str(folder), prompts=[list(range(3, 40)), list(range(60, 70))], max_new_tokens=8,
                       schedules=["plain", "batched"], dtype="bfloat16")
print([(str(run.outcome), run.coverage.missing, run.coverage.not_offered) for run in result.runs])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=FOLDER / "nano_vllm", capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[('pass', 0, ()), ('pass', 0, ())]", done.stdout + done.stderr
