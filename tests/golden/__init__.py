"""A golden corpus: small experiments, and what the command line prints and writes of each, as recorded files.

`python -m tests.golden record [NAMES]` records, `python -m tests.golden compare [NAMES]` shows what differs.
"""
