"""What each kind of run found: typed records, one file a subject, without torch."""
