"""Has a main line drifted? Asked of one candidate (gate), many recipes (fleet), a chain of changes (chain)."""
