"""Parts that all suites share: actions that can be run again, the search, its findings, and their shrinking."""
