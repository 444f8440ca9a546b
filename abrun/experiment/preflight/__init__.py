"""Preflight checks: whether a plan can run on a machine."""
