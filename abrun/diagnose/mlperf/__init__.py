"""MLPerf's check of a submission against reference convergence points."""
