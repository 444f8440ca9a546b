"""Measured memory of a training step."""
