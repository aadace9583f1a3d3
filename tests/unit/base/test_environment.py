"""The commit that the code is of: as git says in a checkout, else as the build wrote it."""

import subprocess

import pytest

from harness.base import environment


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Let the package lie in another folder."""
    folder = tmp_path / "site-packages"
    monkeypatch.setattr(environment, "__file__", str(folder / "harness" / "base" / "environment.py"))
    (folder / "harness").mkdir(parents=True)
    return folder


def commit(folder):
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout[:12]


def test_what_the_build_wrote(installed):
    (installed / "harness" / "commit.txt").write_text("0123456789ab\n")
    assert environment.own_commit() == "0123456789ab"


def test_a_repository_around_an_installed_package_is_another_one(installed):
    assert commit(installed.parent)
    assert environment.own_commit() == ""


def test_a_checkout_asks_git(installed):
    (installed / "harness" / "commit.txt").write_text("an older one")
    head = commit(installed)
    assert environment.own_commit() == head
