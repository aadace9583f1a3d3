"""The reference engine against its peers: the same weights, the same prompts, the same tokens, in the same run."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="bench",
    panel=Panel.OTHERS,
    help="Compare the speed of an engine with other engines.",
    target="harness.extensions.bench.command:app",
)
