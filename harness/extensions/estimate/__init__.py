"""What a model needs of memory, bandwidth and arithmetic, from its config alone."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="estimate",
    panel=Panel.OTHERS,
    help="Estimate memory, FLOPs and the best possible speed of a model on GPUs.",
    target="harness.extensions.estimate.command:estimate",
)
