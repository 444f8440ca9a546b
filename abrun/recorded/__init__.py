"""Runs of any source, as one experiment: what is compared."""
