"""The command line. Standard output carries data, standard error progress; exit statuses are `errors.ExitStatus`."""

from harness.cli.main import main

__all__ = ["main"]
