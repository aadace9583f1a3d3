"""Schedules that are searched: workloads for a live engine, each judged as a check judges (docs/fuzz.md)."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="fuzz",
    panel=Panel.SEARCH,
    help="Search for workloads that an engine computes wrong.",
    target="harness.extensions.fuzz.command:app",
)
