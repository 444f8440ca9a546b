"""abrun bisect: the commit, or the version of a package, that broke a claim, at a stated error rate."""
