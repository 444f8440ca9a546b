"""Keep or discard many candidates against an incumbent, at a bounded false discovery rate."""
