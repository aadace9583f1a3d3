"""What every room stands on: files, scratch folders, threads, worker processes, the environment, metrics, numbers."""
