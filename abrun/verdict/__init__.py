"""From an experiment to a verdict: validity, evidence, guards, and the sentences that carry it."""
