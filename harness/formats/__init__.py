"""What is read and written: recordings, checkpoints, names of taps, cases, schedules."""
