"""Structured output under test: the tokens that a mask allows, against a reference automaton (llguidance).

`schemas` generates, `automaton` is the reference, `naming` names a token that only one of them allows.
"""
