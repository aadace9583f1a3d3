"""docs/endpoints.md: its program checks a server, and prints what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..loopback import serving

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from reference_engine import LLMEngine
from reference_engine.server.app import build_app
from reference_engine.server.text import Text

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "endpoints.md").read_text()
FOLDER = ROOT / "cases" / "checkpoints" / "qwen3-tiny"


@pytest.mark.slow
def test_the_program_prints_what_stands_under_it(tmp_path):
    ((program, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with LLMEngine(FOLDER) as engine, serving(build_app(engine, Text(FOLDER), model="tiny")) as url:
        done = subprocess.run(
            [sys.executable, "-c", program.replace("http://localhost:8000", url)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_every_way_of_sending_is_on_the_page():
    from harness.campaigns.endpoint.schedules import Way

    assert re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE) == [
        Way.TOGETHER, Way.REPEATED, Way.ALONE, Way.REVERSED, Way.CONTINUED, Way.STREAMED, Way.PROMPT,
    ]  # fmt: skip
