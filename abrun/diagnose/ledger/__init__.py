"""`abrun ledger`: cumulative drift of accepted changes from a reference, against a budget."""
