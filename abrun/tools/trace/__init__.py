"""abrun trace: one step of two arms on the same rollouts, and the first tensor in which they differ."""
