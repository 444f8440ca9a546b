"""Ray: a plan becomes one job, whose driver does on the cluster what `abrun launch` does on one machine.

client.py    the cluster's jobs, through Ray's client; its errors in one line
record.py    records of the job in the experiment's directory
launcher.py  submits a plan; tracks and cancels its job
driver.py    runs as the job: the supervisor over gangs, then the comparison
gangs.py     placement groups for the runs of a pair, with an actor for every node of a run
agent.py     the actor: starts the agent of a node's ranks and reports its state
"""
