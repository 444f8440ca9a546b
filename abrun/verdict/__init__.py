"""From an experiment to a verdict: validity, evidence, guards, and the codes that carry it."""
