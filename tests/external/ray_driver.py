"""A trainer that is a Ray driver: `ray_driver.py NODES STEPS FILE RATE`.

Its placement group takes a CPU of each node, as those of verl, SkyRL and NeMo-RL take all GPUs.
"""

import importlib
import json
import os
import sys
import time
from typing import Any

from ray.util import placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

ray: Any = importlib.import_module("ray")
nodes, steps, out, rate = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
ray.init(address="auto")
group = placement_group([{"CPU": 1}] * nodes, strategy="STRICT_SPREAD")
ray.get(group.ready(), timeout=60)


class Worker:
    def loss(self, step: int) -> tuple[float, str]:
        return int(os.environ["ABRUN_SEED"]) + step * rate, os.uname().nodename


remote = ray.remote(num_cpus=1)(Worker)
workers = [
    remote.options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    ).remote()
    for index in range(nodes)
]
for step in range(1, steps + 1):
    losses, hosts = zip(*ray.get([worker.loss.remote(step) for worker in workers]), strict=True)
    with open(out, "a") as file:
        row = {"step": step, "train/loss": sum(losses) / nodes, "world": len(set(hosts))}
        file.write(json.dumps(row) + "\n")
    time.sleep(0.3)
