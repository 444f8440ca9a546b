"""`abrun launch --export`: a plan as manifests for engines on which abrun itself starts nothing.

command.py     checks a plan and writes the manifests and a submit script, or nothing
jobset.py      Kubernetes: a JobSet per pair of runs
skypilot.py    SkyPilot: a task per run
manifest.py    shared parts: the jobs of a plan, the script of a node, the recipe as a variable
run_node.py    runs on each node of a run
"""
