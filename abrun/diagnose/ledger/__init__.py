"""`abrun ledger`: what the accepted changes of a reference may have drifted in all."""
