"""Training against rollout: the gap in log probabilities, split into terms that are measured and add up."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="rollout",
    panel=Panel.OTHERS,
    help="Split the gap between a trainer's and an engine's log probabilities.",
    target="harness.extensions.rollout.command:rollout",
    has_engines=True,
)
