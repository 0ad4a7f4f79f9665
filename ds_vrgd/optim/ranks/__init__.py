"""A report on the ranks of every step, and a watch that names the one that differs."""
