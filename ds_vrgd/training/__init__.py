"""What every training program of this package shares: start, log, checkpoints, and the ways to end."""
