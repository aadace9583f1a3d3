"""docs/serve.md: its program runs, and its request gets the answer that the page shows."""

import json
import re

import pytest

from ..documentation import ROOT, Page, run_python
from ..loopback import serving

httpx = pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

PAGE = Page("serve")
FOLDER = ROOT / "cases" / "checkpoints" / "qwen3-tiny"


@pytest.mark.slow
def test_the_program_prints_what_stands_under_it():
    ((program, printed),) = PAGE.programs
    done = run_python(ROOT, "-c", program, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_the_request_gets_the_answer():
    from reference_engine import LLMEngine
    from reference_engine.server.app import build_app
    from reference_engine.server.text import Text

    (body,) = re.findall(r"-d '(.*?)'", PAGE.text)
    (shown,) = PAGE.blocks("json")
    with LLMEngine(FOLDER) as engine, serving(build_app(engine, Text(FOLDER), model="qwen3-tiny")) as url:
        answer = httpx.post(f"{url}/v1/completions", json=json.loads(body)).json()
    expected = json.loads(shown.replace('"created": ...', '"created": 0'))
    assert answer | {"id": "...", "created": 0} == expected
