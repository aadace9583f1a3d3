"""docs/endpoints.md: its program checks a server, and prints what the page says."""

import re

import pytest

from ..documentation import ROOT, Page, run_python
from ..loopback import serving

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from reference_engine import LLMEngine
from reference_engine.server.app import build_app
from reference_engine.server.text import Text

PAGE = Page("endpoints")
FOLDER = ROOT / "cases" / "checkpoints" / "qwen3-tiny"


@pytest.mark.slow
def test_the_program_prints_what_stands_under_it(tmp_path):
    ((program, printed),) = PAGE.programs
    with LLMEngine(FOLDER) as engine, serving(build_app(engine, Text(FOLDER), model="tiny")) as url:
        program = program.replace("http://localhost:8000", url)
        done = run_python(tmp_path, "-c", program, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_every_way_of_sending_is_on_the_page():
    from harness.extensions.server.check.requests import Way

    assert re.findall(r"^\| `(\w+)` \|", PAGE.text, flags=re.MULTILINE) == [
        Way.TOGETHER, Way.REPEATED, Way.ALONE, Way.REVERSED, Way.CONTINUED, Way.STREAMED, Way.PROMPT, Way.PLAIN,
        Way.TEXT, Way.SEVERAL,
    ]  # fmt: skip
