"""Slurm: a plan becomes job scripts in the experiment's directory, with a task per pair and a step per run.

launcher.py    Slurm's commands, which runs share a job, its script, the record of submitted jobs;
               submits a plan, completely or not at all; tracks and cancels its jobs
allocation.py  runs on a job's first node: the supervisor, over steps of the allocation
"""
