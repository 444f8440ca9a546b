"""The training loop: one file an algorithm, checkpoints, and what a step records."""
