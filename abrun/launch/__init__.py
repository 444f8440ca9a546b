"""From a plan to its runs."""
