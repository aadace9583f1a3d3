"""The page on two dumps: its program writes them, and its command shows its output."""

from harness.cli.main import run

from ..documentation import Page

PAGE = Page("compare-two-dumps")


def test_the_dumps_of_the_page_differ_as_the_page_says(tmp_path, monkeypatch, checkpoints, capsys):
    (code,) = PAGE.blocks("python")
    (command,) = PAGE.blocks("sh")
    (shown,) = PAGE.blocks("text")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases").symlink_to(checkpoints.parent)
    exec(code, {})
    capsys.readouterr()
    assert run(command.split()[1:]) == 1
    assert capsys.readouterr().out.startswith(shown)
