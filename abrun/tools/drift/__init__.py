"""Drift of a main line: gate, fleet and ledger."""
