"""abrun: paired A/B runs of RL post-training, and a verdict on whether they converge the same way."""
