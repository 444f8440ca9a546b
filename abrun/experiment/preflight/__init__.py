"""What a plan needs of a machine, and why it cannot run there."""
