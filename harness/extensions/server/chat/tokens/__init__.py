"""Chats under test: generated conversations, rendered by HF's template, against the tokens that a server or engine saw.

`conversations` generates, `rendering` is the truth, `seen` asks a server what it saw, `causes` names a difference.
"""

from harness.base.plugins import require_hypothesis

require_hypothesis("generating conversations", __name__)
