"""Memory of a training step, predicted on a fake GPU."""
