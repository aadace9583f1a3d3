"""Training against rollout: the gap in log probabilities, split into terms that are measured and add up."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="rollout",
    panel=Panel.OTHERS,
    help="Split the gap between the log probabilities of a trainer and an engine.",
    target="harness.extensions.rollout.command:rollout",
    has_engines=True,
)
