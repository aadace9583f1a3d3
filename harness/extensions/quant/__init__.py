"""`harness quant`: what the formats of a model cost, and what an engine's arithmetic costs besides."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="quant",
    panel=Panel.OTHERS,
    help="Measure what quantised formats cost a model.",
    target="harness.extensions.quant.command:quant",
)
