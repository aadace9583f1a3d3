"""The HTML report, as plain numbers and words: one file a figure, drawn by the templates.

Lengths on a plot are shares of its area in percent, so that it fills whatever width there is.
"""
