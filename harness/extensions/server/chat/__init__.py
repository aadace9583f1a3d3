"""Chats: what a server makes of conversations, of tool calls and of structured output.

`conversations` generates and renders, `search` finds differences and `causes` names them, `text` checks the text of
answers, `run` is the job. `tool_calls` checks a parser, `masks` checks the masks of structured output.
"""
