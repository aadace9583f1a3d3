"""`python -m harness`: the command line, where the script is not on the path."""

from harness.cli import main

main()
