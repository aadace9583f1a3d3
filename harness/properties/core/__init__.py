"""What all suites share: actions that can be run again, the search, what is found, and how it is made small."""
