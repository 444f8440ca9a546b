"""Pure statistics on arrays."""
