"""What a bare machine lacks: entry points without an installation, and packages that travel as wheels."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from .work import ROOT

WHEELS = ROOT / ".whl"
"""Wheels for the machine's Python: `pip download --only-binary :all: --python-version 3.12 -d .whl msgspec ...`."""


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the steps, with the project and its wheels on the path; `folder` keeps them."""
    site = folder / ".site"
    _entry_points(site)
    if wheels := sorted(map(str, WHEELS.glob("*.whl"))):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target"]
        subprocess.run([*command, str(site), *wheels], check=False)
    paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HARNESS_TRACEBACK": "1",
        "HARNESS_CACHE": str(folder / ".cache"),
        "TRITON_CACHE_DIR": str(folder / ".triton"),
    }


def _entry_points(site: Path) -> None:
    """Write what pip would note of the project: without it no engine is found."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = project["name"].replace("-", "_")
    info = site / f"{name}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    groups = project.get("entry-points", {}).items()
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entry_points.items())
        for group, entry_points in groups
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
