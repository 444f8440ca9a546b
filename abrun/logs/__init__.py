"""Readers for the logs of any framework: TensorBoard, wandb, CSV, JSON lines, Parquet and others.

A source is a file, a folder that may hold many runs, or a project on a wandb server. Each run becomes a
`Log`. The module `naming` finds its arm and seed, and `aliases` maps its metric names to abrun's.
"""

from abrun.logs.log import Log
from abrun.logs.read import FORMATS, prefixes, read_log, read_logs

__all__ = ["FORMATS", "Log", "prefixes", "read_log", "read_logs"]
