"""`abrun export`: a plan as manifests for engines that abrun itself starts nothing on.

jobset.py      Kubernetes: a JobSet for each pair of runs
skypilot.py    SkyPilot: a task for each run
command.py     refused, or written whole after every manifest has passed its engine's schema
parts.py       what both have: the jobs of a plan, the shell line of a node, the recipe as a variable
schema.py      the offline check, against the engines' own schemas (`*.schema.json`)
member.py      what each node of a run does there
"""

from abrun.launch.export.command import export

__all__ = ["export"]
