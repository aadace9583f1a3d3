"""`harness quant`: what the formats of a model cost, and what an engine's arithmetic costs besides."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="quant",
    panel=Panel.OTHERS,
    help="Measure the quality that quantised formats of a model lose.",
    target="harness.extensions.quant.command:quant",
)
