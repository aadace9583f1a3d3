"""Engines with mistakes in them, sound variants, and the score of tools on both."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="faults",
    panel=Panel.OTHERS,
    help="Ask tools about engines with known mistakes in them, and count the right answers.",
    target="harness.extensions.faults.command:faults",
)
