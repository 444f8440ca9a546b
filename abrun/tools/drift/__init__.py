"""Has a main line drifted? Asked of one candidate (gate), many recipes (fleet) and a chain of changes."""
