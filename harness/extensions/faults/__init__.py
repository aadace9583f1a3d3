"""Bugs put into the reference engine on purpose, and the score of the harness on them."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="faults",
    panel=Panel.OTHERS,
    help="Put known bugs into the reference engine, and show which ones the check detects.",
    target="harness.extensions.faults.command:faults",
)
