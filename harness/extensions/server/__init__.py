"""Checks of servers over HTTP: tokens, samplers, chats, what is served, and answers under load."""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="server",
    panel=Panel.SERVERS,
    help="Check a server: tokens, sampler, chats, what it serves, answers under load.",
    target="harness.extensions.server.command:app",
)
