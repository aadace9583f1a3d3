"""The program of docs/tool-calls.md finds what the page shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hypothesis", reason="the extra `test` is not installed")

from ..unit.campaigns.tool_calls.conftest import write_family

PAGE = (Path(__file__).parents[2] / "docs" / "tool-calls.md").read_text()
FILES = dict(re.findall(r"```python title=(\S+)\n(.*?)```", PAGE, flags=re.DOTALL))


@pytest.mark.slow
def test_the_program_finds_what_the_page_shows(tmp_path):
    (tmp_path / "models").mkdir()
    write_family(tmp_path / "models" / "qwen", "hermes")
    (tmp_path / "check_my_parser.py").write_text(FILES["check_my_parser.py"])
    done = subprocess.run(
        [sys.executable, "check_my_parser.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    shown = re.findall(r"^  H256  .*$", PAGE, flags=re.MULTILINE)
    assert len(shown) == 2
    assert re.findall(r"^  H256  .*$", done.stdout, flags=re.MULTILINE) == shown
