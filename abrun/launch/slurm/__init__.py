"""Slurm: a plan becomes job scripts in the experiment's directory, a task for each pair, a step for each run.

commands.py    sbatch, squeue, scontrol, scancel: what they are asked, and their refusals in one line
jobs.py        which runs share a job, the scripts, and the record of what was submitted
launcher.py    a plan on its way there: checked, submitted whole or not at all, followed, cancelled
allocation.py  what a job script runs on its first node: the supervisor, over steps of the allocation
"""
