"""Slurm: a plan becomes job scripts in the experiment's directory, with a task per pair and a step per run.

commands.py    sbatch, squeue, scontrol, scancel; their errors in one line
jobs.py        which runs share a job, the scripts, and the record of submitted jobs
launcher.py    submits a plan, completely or not at all; tracks and cancels its jobs
allocation.py  runs on a job's first node: the supervisor, over steps of the allocation
"""
