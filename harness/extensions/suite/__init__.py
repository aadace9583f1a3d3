"""Many checks as one: cases and a matrix become tasks, which run in processes here or on the nodes of a Ray cluster."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="suite",
    panel=Panel.SEARCH,
    help="Run many checks, on this machine or on a Ray cluster.",
    target="harness.extensions.suite.command:app",
)
