"""One training step of any framework, recomputed in float64 from a dump of it: `abrun audit`."""
