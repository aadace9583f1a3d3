"""Tool-call parsers under test: generated calls, rendered by HF's template, must be read out of the text unchanged.

`answers` generates, `writing` is the text and where a template loses something, `reading` takes what a parser returns,
`naming` names a difference.
"""
