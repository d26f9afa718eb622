"""What a run leaves behind: its directory, metrics, progress display and report."""
