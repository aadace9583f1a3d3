"""The README's code runs, and its commands are the ones that CI runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def without_decimals(text: str) -> str:
    return re.sub(r"\d+\.\d+(e[+-]?\d+)?", "#", text)


def test_the_planted_bug_is_found_where_the_readme_says():
    (command,) = [block.strip() for block in blocks("sh") if "--fault" in block]
    code = f"from harness.cli.main import run; run({command.split()[1:]!r})"
    environment = os.environ | {"COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("MISMATCH  reference · qwen3-tiny · float32")
    shown = blocks("text")[0]
    for line in shown[shown.index("First divergence") :].splitlines():
        if "roundings" not in line:  # the last digits depend on the machine, and on the version of torch
            assert without_decimals(line.strip()) in without_decimals(done.stdout)


def test_the_two_commands_stand_on_the_first_screen():
    first, second = (block.strip() for block in blocks("sh")[:2])
    assert (first, second) == ("pip install -e . && harness check", "pip install -e '.[test]' && pytest")
    assert README.index(second) < 400


def test_ci_runs_the_test_command_word_for_word():
    assert blocks("sh")[1].strip() in (ROOT / ".ci" / "run").read_text()


def test_every_page_the_readme_links_to_is_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
