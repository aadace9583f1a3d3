"""docs/write-an-extension.md: its package adds a command and a reader."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from harness.formats.checkpoint import resolve

from ..documentation import Page

PAGE = Page("write-an-extension")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as pip installs it: its modules, and its entry points in a folder of metadata."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "harness_npz").mkdir()
    PAGE.write_files(folder)
    (project,) = PAGE.blocks("toml title=pyproject.toml")
    groups = tomllib.loads(project)["project"]["entry-points"]
    lines = [f"[{group}]\n{name} = {value}" for group, names in groups.items() for name, value in names.items()]
    metadata = folder / "harness_npz-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: harness-npz\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights are in an .npz file."""
    folder, source = tmp_path_factory.mktemp("checkpoint"), resolve("qwen3-tiny")
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    numpy.savez(folder / "weights.npz", **load_file(source / "model.safetensors"))
    return folder


def harness(installed: Path, *arguments: str) -> str:
    """Run the command line beside the extension, and return what it prints."""
    code = f"from harness.cli.main import run; raise SystemExit(run({list(arguments)!r}))"
    path = os.pathsep.join((str(installed), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": path, "HARNESS_CACHE": str(installed / "cache")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_is_listed(installed: Path) -> None:
    assert "parameters  Count the parameters of a checkpoint." in harness(installed, "--help")


def test_the_command_prints_what_the_page_shows(installed: Path) -> None:
    command, expected = PAGE.blocks("text")[0].strip().splitlines()
    assert harness(installed, *command.removeprefix("> harness ").split()).strip() == expected


def test_the_reader_makes_a_model_of_the_file(installed: Path, checkpoint: Path) -> None:
    _, expected = PAGE.blocks("text")[0].strip().splitlines()
    assert harness(installed, "parameters", "--model", str(checkpoint)).strip() == expected
    (converted,) = installed.glob("cache/npz/*/made_from.json")
    written = {file.name for file in converted.parent.iterdir()}
    assert {"config.json", "tokenizer.json", "model-00001.safetensors"} <= written
