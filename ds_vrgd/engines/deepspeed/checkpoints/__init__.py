"""DeepSpeed's checkpoints: read without running anything, carried over to other numbers of ranks, and loaded there."""
