"""A recipe becomes runs."""
