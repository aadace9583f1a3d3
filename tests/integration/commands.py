"""The command line in this process, a golden and a recording to look at, and engines of other packages."""

import hashlib
import importlib
import json
import math
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import reference_engine.cli
from harness.cli.main import run
from harness.command import progress
from harness.oracle.golden import INFO_FILE, GoldenInfo

ENGINE = """
from harness.engines import open_engine as open_any


class Between:
    def __init__(self, writer):
        self.writer = writer

    def __getattr__(self, name):
        return getattr(self.writer, name)


class Engine:
    name = "foreign"

    def __init__(self, inner):
        self.inner, self.capabilities = inner, inner.capabilities

    def run(self, workload, writer):
        self.inner.run(workload, Between(writer))


def open_engine(folder, *, dtype, device, options):
    return Engine(open_any("reference", folder, dtype=dtype, device=device, options=options))
"""
"""The reference engine as another package's; tests replace a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)


@pytest.fixture
def harness(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run a command of the harness; no way to end shows a traceback."""
    for name in ("CI", "HARNESS_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        progress, "LINE_EVERY_S", math.inf
    )  # a slow machine would write a line where a fast one has none

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Ran(status=status, out=out, err=err)

    return call


@pytest.fixture
def engine(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command of the reference engine."""

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        status = reference_engine.cli.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Ran(status=status, out=out, err=err)

    return call


@pytest.fixture(scope="session")
def llama(checkpoints: Path) -> Path:
    """The smallest checkpoint."""
    return checkpoints / "llama-tiny"


@pytest.fixture(scope="session")
def workload() -> list[str]:
    """Options of a workload of two requests that decodes, as short as can be."""
    return ["--token-ids", "1,4,5,6,7,8", "--token-ids", "1,9,10", "--max-new-tokens", "3"]


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory, llama: Path, workload: list[str]) -> Path:
    """A golden of that workload; copy it to damage it."""
    folder = tmp_path_factory.mktemp("golden") / "golden"
    assert run(["golden", "--model", str(llama), *workload, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Path:
    """A sound recording of the reference engine on that golden; copy it to damage it."""
    folder = tmp_path_factory.mktemp("recording") / "recording"
    assert run(["record", "--golden", str(golden), "--schedule", "batched", "--out", str(folder)]) == 0
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], *, step: int = 0) -> None:
    """Change a step's tensors and put the manifest right, as another producer would have written them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = manifest["steps"][step]
    path = folder / entry["file"]
    tensors = safetensors.torch.load(path.read_bytes())
    change(tensors)
    safetensors.torch.save_file(tensors, path)
    entry |= {"num_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    taps = {tap["name"]: tap for tap in manifest["taps"]}
    for name in taps.keys() & tensors.keys():
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}[tensors[name].dtype]
        taps[name] |= {"dtype": dtype, "shape": list(tensors[name].shape[1:])}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if (folder / INFO_FILE).exists():
        info = GoldenInfo.model_validate_json((folder / INFO_FILE).read_bytes())
        (folder / INFO_FILE).write_text(GoldenInfo.of(folder, info.key, info.graph(), info.sketched).model_dump_json())


@pytest.fixture
def changed(checkpoints, tmp_path):
    """A copy of a checkpoint with changes to its JSON files."""

    def change(name: str, **files: dict[str, object]):
        folder = tmp_path / name
        shutil.copytree(checkpoints / name, folder)
        for file, values in files.items():
            path = folder / f"{file}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder

    return change


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Install an engine of another package, as pip does: a module and the entry point in its metadata."""

    def install_engine(source: str, *, name: str = "foreign", opener: str = "open_engine") -> str:
        module = f"{name.replace('-', '_')}_package_{abs(hash(tmp_path))}"
        site = tmp_path / f"site-{name}"
        metadata = site / f"{module}-1.0.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (site / f"{module}.py").write_text(source)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[inference_harness.engines]\n{name} = {module}:{opener}\n")
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, module, raising=False)
        return name

    return install_engine


def listen_to_ctrl_c() -> None:
    """For `preexec_fn`: a process started from a shell's background job would ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="session")
def url():
    """The address of a server of qwen3-tiny, for tests that look for the extra `serve` first."""
    from reference_engine import EngineConfig, LLMEngine
    from reference_engine.server.app import build_app
    from reference_engine.server.text import Text

    from ..loopback import serving

    folder = Path(__file__).parents[2] / "cases" / "checkpoints" / "qwen3-tiny"
    with LLMEngine(folder, EngineConfig(dtype="float32")) as engine:
        app = build_app(engine, Text(folder), model="tiny")
        with serving(app) as address:
            yield address
