"""Models: presets with random weights, and Hugging Face checkpoints (a local folder or a hub name)."""
