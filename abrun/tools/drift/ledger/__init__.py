"""Ledger of a reference: cumulative drift of accepted changes from a reference, against a budget."""
