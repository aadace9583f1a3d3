"""The reference engine against its peers: the same weights, the same prompts, the same tokens, in the same run."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="bench",
    panel=Panel.OTHERS,
    help="Time an engine against its peers.",
    target="harness.extensions.bench.command:app",
)
