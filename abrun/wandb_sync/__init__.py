"""Runs and reports in wandb. The store is the truth, and wandb mirrors it: while a run trains, or afterwards.

Whatever wandb does happens in a process of its own: it may raise anything, die, or wait for a network for
ever, and what it mirrors goes on.

__main__.py    `python -m abrun.wandb_sync RUN_DIR`: follows a run's metrics, and sends them
wandb_run.py   one run of wandb for one run directory; steps that it has are never sent again
sync.py        `abrun sync`: what was recorded offline, or got lost on the way
report.py      `abrun compare --wandb`: the report as an artifact, the verdict in its run's summary
"""
