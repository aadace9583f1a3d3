"""Write the commit into a wheel or an sdist that is built in a checkout: where it is installed there is no git to ask."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Adds `harness/commit.txt`, which an sdist already has where a wheel is built from it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling."""
        self.folder = tempfile.TemporaryDirectory()
        if version == "editable" or not (Path(self.root) / ".git").exists():
            return
        command = ["git", "-C", self.root, "describe", "--always", "--dirty", "--abbrev=12"]
        try:
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"the commit is not known: {error}")
            return
        file = Path(self.folder.name) / "commit.txt"
        file.write_text(commit, encoding="utf-8")
        build_data["force_include"][str(file)] = "harness/commit.txt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """See hatchling."""
        self.folder.cleanup()
