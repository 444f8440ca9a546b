"""Mirrors runs and reports to wandb, during training or afterwards. The run store stays authoritative.

All calls to wandb happen in separate processes: wandb may raise anything, die, or wait for a network forever
without affecting the run.

__main__.py        `python -m abrun.wandb_sync RUN_DIR`: follows a run's metrics and sends them
wandb_run.py       one wandb run for one run directory; never sends a step twice
sync.py            `abrun wandb-sync`: sends what was recorded offline or was lost
report.py          `abrun compare --wandb`: the report as an artifact, the verdict in its run's summary
timed_process.py   runs a module in a process with a time limit
"""
