"""A second checkout of a git repository, for other revisions: the user's own is not touched."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.base.files import scratch_folder
from harness.errors import Code, HarnessError

_OURS = "harness"


class Checkout:
    """A worktree of a repository, at one revision after the other."""

    def __init__(self, repository: Path, folder: Path, links: Path) -> None:
        """Use `checkout`."""
        self._repository, self.folder, self._links = repository, folder, links

    def commit(self, revision: str) -> str:
        """Return the full hash of a revision; raises HarnessError (BAD_BISECTION)."""
        what = f"there is no revision {revision!r}"
        return _git(self._repository, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}", what=what)

    def subject(self, commit: str) -> str:
        """Return the first line of a commit's message."""
        return self.git("log", "-1", "--format=%s", commit)

    def at(self, commit: str) -> None:
        """Check a commit out; what a build has left is taken away."""
        self.git("checkout", "--quiet", "--force", "--detach", commit)

    def git(self, *arguments: str) -> str:
        """Run git in the worktree and return what it prints; raises HarnessError (BAD_BISECTION)."""
        return _git(self.folder, *arguments, what=f"git {arguments[0]} failed")

    def build(self, command: str) -> str | None:
        """Build the engine in the worktree; return the last line of what was said if that fails."""
        done = subprocess.run(
            command, shell=True, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return None if done.returncode == 0 else (said or [f"exit status {done.returncode}"])[-1]

    def importable(self, subfolder: str) -> Path:
        """Return a folder to import from: all that is in the worktree's, but the harness, which judges all alike."""
        for entry in self._links.iterdir():
            # Python puts the bytecode of a module that is a file of its own beside the link.
            entry.unlink() if entry.is_symlink() else shutil.rmtree(entry)
        for path in (self.folder / subfolder).iterdir():
            if path.name not in (_OURS, ".git"):
                (self._links / path.name).symlink_to(path)
        return self._links


@contextmanager
def checkout(repository: Path) -> Iterator[Checkout]:
    """Yield a worktree of the repository, which is gone after the block.

    Raises:
        HarnessError: BAD_BISECTION: it is no git repository.
    """
    with scratch_folder("harness-bisect-") as scratch:
        folder, links = scratch / "checkout", scratch / "links"
        links.mkdir()
        what = "the folder is no git repository with a commit"
        _git(repository, "worktree", "add", "--quiet", "--detach", str(folder), what=what)
        try:
            yield Checkout(repository, folder, links)
        finally:
            _git(repository, "worktree", "remove", "--force", str(folder), what="the worktree cannot be removed")


def _git(folder: Path, *arguments: str, what: str) -> str:
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        lines = [line for line in said.splitlines() if line.strip()]
        reason = f": {lines[-1]}" if lines else ""
        raise HarnessError(Code.BAD_BISECTION, f"{what}{reason}", where=folder) from error
