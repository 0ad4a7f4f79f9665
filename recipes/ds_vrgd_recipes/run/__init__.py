"""The run that all training programs share: the loop, the log, checkpoints, and the ways to end."""
