"""The page on folders of tensors: its dump is judged by its command."""

import re
from pathlib import Path

from harness.cli.main import run

PAGE = (Path(__file__).parents[2] / "docs" / "check-a-folder-of-tensors.md").read_text()


def test_the_dump_of_the_page_passes_the_command_of_the_page(tmp_path, monkeypatch, checkpoints, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (command,) = re.findall(r"```sh\nharness (.*?)\n```", PAGE, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump").mkdir()
    exec(code, {"checkpoint": checkpoints / "qwen2-tiny"})
    assert run(command.split()) == 0
    assert capsys.readouterr().out.startswith("PASS  tensors · qwen2-tiny · float32")
