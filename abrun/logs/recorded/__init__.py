"""Recorded runs from any source, combined into one experiment to compare."""
