"""Does a change need more, or take longer? Counts against a baseline, time in pairs against another version."""
