"""`python -m reference_engine`: the command line, where the script is not on the path."""

from reference_engine.cli import main

main()
