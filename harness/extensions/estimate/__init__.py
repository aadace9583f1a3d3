"""What a model needs of memory, bandwidth and arithmetic, from its config alone."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="estimate",
    panel=Panel.OTHERS,
    help="Estimate what a model needs on a GPU, from its config.",
    target="harness.extensions.estimate.command:estimate",
)
