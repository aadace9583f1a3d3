"""Checks of servers over HTTP, each in a folder of its own; they share a client, a probe and HF's truth.

`address` and `client` send requests, `completion` and `names` write and read their bodies, `probe` finds out what a
server can do, `truth` runs HF over the tokens that came back, `logprobs` judges errors of log probabilities.
"""

from harness.command.entry import CommandEntry, Panel

COMMAND = CommandEntry(
    name="server",
    panel=Panel.SERVERS,
    help="Check an OpenAI-compatible server: tokens, sampler, chat, weights, and answers under load.",
    target="harness.extensions.server.command:app",
)
