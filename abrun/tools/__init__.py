"""Tools around a comparison, each behind one command."""
