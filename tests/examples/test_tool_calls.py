"""The program of docs/tool-calls.md finds what the page shows."""

import re

import pytest

pytest.importorskip("hypothesis", reason="the extra `test` is not installed")

from ..documentation import Page, run_python
from ..extensions.server.chat.tool_calls.conftest import write_family

PAGE = Page("tool-calls")


@pytest.mark.slow
def test_the_program_finds_what_the_page_shows(tmp_path):
    (tmp_path / "models").mkdir()
    write_family(tmp_path / "models" / "qwen", "hermes")
    done = run_python(PAGE.write_files(tmp_path), "check_my_parser.py")
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^  H256  .*$", PAGE.text, flags=re.MULTILINE)
    assert len(shown) == 2
    assert re.findall(r"^  H256  .*$", done.stdout, flags=re.MULTILINE) == shown
