"""Ray: a plan becomes one job, whose driver does on the cluster what `abrun launch` does on one machine.

launcher.py  Ray's client, whose errors are one line; the job's records; submits, tracks and cancels it
driver.py    runs as the job: the supervisor over gangs, then the comparison
gangs.py     placement groups for the runs of a pair, with an actor for every node of a run
agent.py     the actor: starts the agent of a node's ranks and reports its state
"""
