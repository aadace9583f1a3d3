"""Pages of the documentation: their blocks of code, written, run and imported."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


class Page:
    """A page of docs, or the README."""

    def __init__(self, name: str) -> None:
        folder = ROOT if name == "README" else ROOT / "docs"
        self.text = (folder / f"{name}.md").read_text(encoding="utf-8")

    def blocks(self, language: str) -> list[str]:
        """Return the text of the blocks in a language; of a file, the language is `python title=NAME`."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, flags=re.DOTALL | re.MULTILINE)

    @property
    def files(self) -> dict[str, str]:
        """The blocks that have a file's name."""
        return dict(re.findall(r"^```python title=(\S+)\n(.*?)^```$", self.text, flags=re.DOTALL | re.MULTILINE))

    @property
    def programs(self) -> list[tuple[str, str]]:
        """The programs, each with what stands under it as its output, which may be empty."""
        return re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", self.text, flags=re.DOTALL)

    def write_files(self, folder: Path) -> Path:
        """Write the blocks that have a file's name into a folder."""
        for name, text in self.files.items():
            (folder / name).write_text(text)
        return folder


def run_python(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with variables added to the environment."""
    command, environment = [sys.executable, *arguments], os.environ | variables
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)


@contextmanager
def imported(folder: Path, module: str, *others: str) -> Iterator[ModuleType]:
    """Import a module from a folder; afterwards it is forgotten, and so are others that it has imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module(module)
    for name in (module, *others):
        del sys.modules[name]
