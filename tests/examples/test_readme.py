"""The README's code runs, and its commands are the ones that CI runs."""

import os
import re
import subprocess
import sys

from ..documentation import ROOT, Page

README = Page("README")


def test_the_planted_bug_is_found_where_the_readme_says():
    (command,) = [block.strip() for block in README.blocks("sh") if "harness faults" in block]
    code = f"from harness.cli.main import run; run({command.split()[1:]!r})"
    environment = os.environ | {"COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("MISMATCH  reference · qwen3-tiny · float32")
    shown = README.blocks("text")[0]
    assert without_figures(shown[shown.index("First divergence") : shown.index("  layer ")]) in without_figures(
        done.stdout
    )


def without_figures(text: str) -> str:
    """Return the text in one line, its measured figures replaced: these, and so the line breaks, depend on the CPU."""
    return re.sub(r"\d[\d,]*(\.\d+)?e[+-]\d+|\d[\d,]*\.\d+|\d{1,3}(,\d{3})+", "#", " ".join(text.split()))


def test_the_two_commands_stand_on_the_first_screen():
    first, second = (block.strip() for block in README.blocks("sh")[:2])
    assert first == "pip install -c constraints.txt -e . && harness check"
    assert second == "pip install -c constraints.txt -e '.[test]' && pytest"
    assert README.text.index(second) < 450


def test_the_readme_is_short():
    assert len(README.text.splitlines()) <= 150


def test_ci_runs_the_test_command_word_for_word():
    assert README.blocks("sh")[1].strip() in (ROOT / ".ci" / "run").read_text()


def test_every_page_the_readme_links_to_is_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.text):
        assert (ROOT / target).exists(), target
