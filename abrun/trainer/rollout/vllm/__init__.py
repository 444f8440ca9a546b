"""vLLM as rollout engine: see `engines`."""
