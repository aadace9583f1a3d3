"""Traces and memory snapshots of any program: summaries, differences, critical paths, flame graphs."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="trace",
    panel=Panel.PROFILE,
    help="Read Chrome traces and memory snapshots of torch.",
    target="harness.extensions.trace.command:app",
)
