"""One check result in several forms: for a terminal, for a pull request, for a program, for a JUnit file.

Nothing here measures or judges; the modules know `results`, `errors` and `taps` only, and import no torch.
"""
