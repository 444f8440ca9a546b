"""Ray: a plan becomes one job of a cluster, whose driver does there what `abrun launch` does on one machine.

client.py    the cluster's jobs, asked by their client, and its refusals in one line
record.py    what an experiment's directory says of its job: what was submitted, and what the driver says
launcher.py  a plan on its way there, and what has become of it: submitted, followed, cancelled
driver.py    what the job runs: the supervisor of every launch over gangs, then the comparison
gangs.py     placement groups for the runs of a pair, and in each an actor for every node of a run
agent.py     the actor: starts the agent of the node's ranks, and tells how it is
"""
