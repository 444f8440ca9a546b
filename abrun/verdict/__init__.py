"""Verdict of an experiment: validity, evidence, guards, and the reason codes that explain it."""
