"""docs/check-your-vllm.md: what it shows is run, and says what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "check-your-vllm.md").read_text()
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_shows_two_commands_and_a_bug():
    assert [kind for kind, _code, _shown in BLOCKS] == ["bash", "bash", "python"]


@pytest.mark.parametrize(("kind", "code", "shown"), BLOCKS, ids=["plain", "option", "bug"])
def test_what_the_page_shows(kind, code, shown):
    command = ["bash", "-c", code] if kind == "bash" else [sys.executable, "-c", code]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    for line in shown.splitlines():
        assert line.strip() in ran.stdout, ran.stdout + ran.stderr
