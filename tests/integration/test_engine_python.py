"""An engine in another environment: its Python has numpy and nothing else, and records."""

import json
import site
import subprocess
import sys
import venv
from pathlib import Path

import numpy
import pytest

from harness.errors import Code
from harness.formats.recording import Recording

ENGINE = """
import sys
import numpy as np
from harness.engines import Capabilities

class Engine:
    name, capabilities = "elsewhere", Capabilities(schedules=("plain",))
    environment = {"elsewhere": "1.5", "prefix": sys.prefix}

    def run(self, workload, writer):
        assert not {"torch", "pydantic", "transformers"} & set(sys.modules), "the recorder is not light"
        for request in workload.requests:
            rows = len(request.token_ids)
            writer.begin_step(phase="prefill", request=[request.id] * rows, position=range(rows),
                              sampled_rows=[rows - 1])
            writer.tap("model.embed_tokens", np.arange(rows * 2, dtype=np.float32).reshape(rows, 2))
            writer.end_step(sampled=np.array([3]))

def open_engine(folder, *, dtype, device, options):
    {does}
    return Engine()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment with nothing but numpy, which is linked to ours."""
    root = tmp_path_factory.mktemp("elsewhere")
    venv.create(root, with_pip=False, symlinks=True)
    (packages,) = root.glob("lib/python*/site-packages")
    ours = Path(numpy.__file__).parents[1]
    for path in ours.glob("numpy*"):
        (packages / path.name).symlink_to(path)
    return root


@pytest.fixture
def install(environment):
    """Install the engine in the other environment, and not here."""
    (packages,) = environment.glob("lib/python*/site-packages")

    def write(does):
        (packages / "elsewhere.py").write_text(ENGINE.replace("{does}", does))
        info = packages / "elsewhere-1.5.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text("[inference_harness.engines]\nelsewhere = elsewhere:open_engine\n")
        return environment / "bin" / "python"

    return write


def test_an_engine_is_recorded_where_numpy_is_all_there_is(harness, install, llama, tmp_path):
    python = install("pass")
    ran = harness(
        "record", "--model", llama, "--token-ids", "1,2,3", "--max-new-tokens", "2", "--engine", "elsewhere",
        "--engine-python", python, "--out", tmp_path / "out",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    with Recording.open(tmp_path / "out") as recording:
        assert recording.manifest.environment["elsewhere"] == "1.5"
        assert recording.manifest.environment["prefix"] == str(python.parents[1])
        assert recording.manifest.producer.name == "harness.engines.elsewhere"
        (step,) = recording.steps
        assert step.tap("model.embed_tokens").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert step.sampled.tolist() == [-1, -1, -1, 3]


def test_what_it_writes_is_refused_as_here(harness, install, llama, tmp_path):
    python = install(
        "Engine.run = lambda self, workload, writer: writer.begin_step(phase='no', request=[], position=[])"
    )
    ran = harness(
        "record", "--model", llama, "--token-ids", "1,2", "--engine", "elsewhere", "--engine-python", python,
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert (ran.status, ran.err.partition(":")[0]) == (2, Code.BAD_RECORDER_CALL), ran.err
    assert not (tmp_path / "out").exists()


def test_what_it_raises_names_it(harness, install, llama):
    python = install("raise RuntimeError('out of memory')")
    ran = harness("check", "--model", llama, "--token-ids", "1,2", "--engine", "elsewhere", "--engine-python", python)
    assert (ran.status, ran.err.partition(":")[0]) == (2, Code.ENGINE_FAILED)
    assert "out of memory" in ran.err


def test_a_python_that_is_not_there(harness, llama, tmp_path):
    nowhere = tmp_path / "python"
    ran = harness("check", "--model", llama, "--token-ids", "1,2", "--engine", "vllm", "--engine-python", nowhere)
    assert (ran.status, ran.err.partition(":")[0]) == (2, Code.BAD_ENGINE_PYTHON)
    assert str(nowhere) in ran.err


def test_a_python_without_numpy(harness, llama, tmp_path):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    ran = harness("check", "--model", llama, "--token-ids", "1,2", "--engine", "vllm", "--engine-python", python)
    assert (ran.status, ran.err.partition(":")[0]) == (2, Code.BAD_ENGINE_PYTHON)
    assert "numpy" in ran.err


def test_another_environment_is_another_process(harness, llama, install):
    arguments = ["check", "--model", llama, "--token-ids", "1,2", "--engine", "elsewhere", "--engine-timeout", "0"]
    ran = harness(*arguments, "--engine-python", install("pass"))
    assert (ran.status, ran.err.partition(":")[0]) == (2, Code.BAD_OPTION)


def test_the_recorder_imports_numpy_alone():
    code = """
import json, sys
import harness.engines.worker, harness.engines.record
known = set(sys.stdlib_module_names)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} - known)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = set(json.loads(ran.stdout)) - {"__main__", "__mp_main__"}
    startup = {path.stem for folder in site.getsitepackages() for path in Path(folder).glob("*.pth")}
    assert {"harness", "numpy"} <= brought
    assert not {"torch", "pydantic", "transformers", "safetensors", "typer"} & brought, (brought, startup)
