"""Seconds until `auto` values are decided, at first and once they were decided before.

    python -m tests.bench.bench_auto                           # with a GPU: with its measured step
    python -m tests.bench.bench_auto --device-memory 80GiB     # on any machine: predictions only

SFT of Qwen2.5-1.5B's architecture, compiled, in two arms: activation_checkpointing, keep_gathered and
micro_batch_tokens are decided, in processes of their own and with a cache of their own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from abrun.recipe.experiment import load_recipe
from abrun.tools.predict.auto import decide_values
from tests.bench.common import make_parser

RECIPE = Path(__file__).parents[2] / "recipes" / "sft-qwen2.5-1.5b-1n8g-fused-logprobs.yaml"
SETTINGS = [
    "model={preset: qwen2.5-1.5b, path: null}",
    "task={type: arithmetic}",
    "algorithm.batch_size=8192",
    "cluster.gpus_per_node=1",
    "policy.activation_checkpointing=auto",
    "policy.backend.keep_gathered=auto",
    "policy.micro_batch_tokens=auto",
]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--device-memory", help="a size such as 80GiB: only predicts")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.once:
        recipe, memory = load_recipe(RECIPE, [*SETTINGS, *asked.set]), asked.device_memory
        decided = decide_values(recipe, memory, is_local=True, dry_run=memory is not None, say=print)
        print(next(iter(decided.values()))["why"])
        return 0
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "XDG_CACHE_HOME": cache}
        for name in ("first decision", "decided before"):
            started_s = time.monotonic()
            command = [sys.executable, "-m", "tests.bench.bench_auto", *sys.argv[1:], "--once"]
            subprocess.run(command, env=env, check=True)
            print(f"{name}: {time.monotonic() - started_s:.1f} s, start of Python included", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
