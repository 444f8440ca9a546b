"""The mismatch budget: what makes the log-probs of a run's trainer and of its rollout engine differ."""
