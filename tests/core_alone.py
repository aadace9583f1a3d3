"""Run the core's tests where no extension exists: `python -m tests.core_alone [ARGUMENTS OF PYTEST]`.

A copy of the tracked files without `harness/extensions/`, their tests and their entry points comes first on the path.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/unit", "tests/integration", "tests/families")
_EXTENSIONS = "harness/extensions/", "tests/extensions/"
_IN_EXTENSIONS = "harness.extensions."


def copy_core(to: Path) -> None:
    """Copy the tracked files of this checkout, but those of extensions, and write the metadata of a package of them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and not name.startswith(_EXTENSIONS) and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    project = tomllib.loads((to / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = to / f"inference_harness-{project['version']}.dist-info"
    metadata.mkdir()
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(header, encoding="utf-8")
    lines = []
    for group, points in project["entry-points"].items():
        kept = [f"{name} = {value}" for name, value in points.items() if not value.startswith(_IN_EXTENSIONS)]
        lines += [f"[{group}]", *kept]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run pytest in the copy; return its exit status."""
    with tempfile.TemporaryDirectory(prefix="core-alone-") as folder:
        copy_core(Path(folder))
        command = [sys.executable, "-m", "pytest", *(arguments or TESTS)]
        return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": folder}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
