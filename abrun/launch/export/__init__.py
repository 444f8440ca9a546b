"""`abrun export`: a plan as manifests for engines that abrun itself starts nothing on.

command.py     refused, or written whole: the manifests and the script that submits them
jobset.py      Kubernetes: a JobSet for each pair of runs
skypilot.py    SkyPilot: a task for each run
parts.py       what both have: the jobs of a plan, the shell line of a node, the recipe as a variable
member.py      what each node of a run does there
"""
