"""The mismatch budget: causes of the difference between a trainer's and its rollout engine's log-probs."""
