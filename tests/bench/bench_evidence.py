"""The experiments of recipes/evidence on one host, several runs to a GPU, packed as they are judged.

python -m tests.bench.bench_evidence --model FOLDER --output ARCHIVES [--only NAMES] [--limit SECONDS]

Experiments share the GPUs: the next one is launched while places are free, and the one that comes first in
the list gets what becomes free. At the limit runs save a checkpoint and stop; the same command goes on where
that was left, as long as --work is there. ARCHIVES gets NAME.tar.xz of each experiment that a call has begun,
finished or not: report, metrics, completions and the launch's log, no weights. On CPU cores (--gpus 0): --set
makes the recipes small.
"""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from abrun.errors import AbrunError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import make_plan
from abrun.experiment.preflight.machine import find_gpus
from abrun.launch.engine import Place, make_engine
from abrun.launch.local import LocalEngine
from abrun.launch.supervisor import GRACE_S, Printed, run_plan
from abrun.processes import Popen
from abrun.processes import start as start_tied
from abrun.recipe.experiment import load_recipe
from abrun.recipe.implementations import LAUNCHERS
from abrun.recipe.run import RunConfig
from abrun.runs.experiment import run_state
from abrun.runs.lock import Locked
from abrun.runs.rundir import RunDir
from abrun.verdict.verdict_file import VerdictFile, read_verdict_file
from tests.bench.common import make_parser

RECIPES = Path(__file__).parents[2] / "recipes" / "evidence"
ORDER = (  # the most valuable first
    "grpo-fused",
    "fp32-head",
    "sft-fused",
    "dpo-fused",
    "gspo-microbatches",
    "ppo-values",
    "megatron-ppo",
    "context-parallel",
    "vllm-engine",
    "levers",
)
# Places that a run takes of each of its GPUs: a second copy of the weights and a cache, or ranks that wait
# for each other across GPUs which others use, too.
PLACES = {"context-parallel": 2}
SMALL = (".tar.xz", 16 * 2**20)  # of an archive
SAMPLE = 2**20  # of weights, by which a report says how far apart they are: larger files are models
TRIES = 3  # of a launch: vLLM, as it starts, takes offence at memory that others give back
BETWEEN_S = 8.0  # launches: a new one has taken its first places by then
YIELD_S = 1.5  # how long a launch that waits for a place keeps those after it from taking one


class SharedPlaces:
    """The places of several launches: a file each, locked by the launch whose run is there."""

    def __init__(self, folder: Path, gpus: Sequence[str], rank: int, needed: int) -> None:
        self._folder, self._rank, self._needed = folder, rank, needed
        self._names = gpus  # none: on CPU cores
        self._gpus = range(max(len(gpus), 1))
        self._held: list[tuple[Place, list[IO[str]]]] = []
        self._offered: tuple[Place, list[IO[str]]] | None = None

    def find(self, config: RunConfig) -> Place | None:
        """Where a run of this launch could start now, its places locked."""
        waits = self._folder / f"waits-{self._rank}"
        waits.touch()
        self._withdraw()
        if any(self._waits(earlier) for earlier in range(self._rank)):
            return None
        found: dict[int, list[IO[str]]] = {}
        for gpu in sorted(self._gpus, key=lambda each: -num_free(self._folder, each)):
            if len(found) < config.cluster.ranks_per_node and (locked := self._lock(gpu)):
                found[gpu] = locked
        files = [each for of_gpu in found.values() for each in of_gpu]
        if len(found) < min(config.cluster.ranks_per_node, len(self._gpus)):
            _close(files)
            return None
        named = tuple(self._names[gpu] for gpu in sorted(found)) if self._names else ()
        place = named or ("cpu",) * config.devices_per_node
        self._offered = place, files
        return place

    def take(self, place: Place) -> None:
        assert self._offered is not None and self._offered[0] == place
        self._held.append(self._offered)
        self._offered = None

    def give_back(self, place: Place) -> None:
        index = next(index for index, (held, _) in enumerate(self._held) if held == place)
        _close(self._held.pop(index)[1])

    def _withdraw(self) -> None:
        if self._offered is not None:  # and not taken: the run was somebody else's to make
            _close(self._offered[1])
            self._offered = None

    def _waits(self, rank: int) -> bool:
        file = self._folder / f"waits-{rank}"
        return file.exists() and time.time() - file.stat().st_mtime < YIELD_S

    def _lock(self, gpu: int) -> list[IO[str]]:
        locked: list[IO[str]] = []
        for path in places_of(self._folder, gpu):
            if len(locked) < self._needed and (file := locked_file(path)):
                locked.append(file)
        if len(locked) < self._needed:
            _close(locked)
            return []
        return locked


class SharingEngine(LocalEngine):
    """The local engine, on places that it shares with other launches."""

    asked: "Asked"  # of this process

    def __init__(self, num_jobs: int | None = None) -> None:
        super().__init__(num_jobs)
        asked = self.asked
        needed = PLACES.get(asked.name, 1)
        gpus = self._machine.gpus[: asked.gpus]
        self._slots: Any = SharedPlaces(asked.work / "places", gpus, asked.rank, needed)

    def place(self, run: RunDir, config: RunConfig) -> Place | None:
        return self._slots.find(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One experiment, as the process that launches it hears of it."""

    name: str
    rank: int
    gpus: int
    work: Path
    overrides: list[str]

    @property
    def recipe(self) -> Path:
        return RECIPES / f"smollm2-{self.name}.yaml"

    @property
    def directory(self) -> Path:
        return self.work / "runs" / self.recipe.stem

    @property
    def command(self) -> list[str]:
        content = {**{name: getattr(self, name) for name in self.__slots__}, "work": str(self.work)}
        return [sys.executable, "-m", "tests.bench.bench_evidence", "--one", json.dumps(content)]


def launch_one(asked: Asked) -> int:
    """The process of one experiment: launch or resume it, and judge it once all of its runs have ended."""
    SharingEngine.asked = asked
    LAUNCHERS["sharing"] = "tests.bench.bench_evidence:SharingEngine"
    plan = make_plan(load_recipe(asked.recipe, asked.overrides))
    for _ in range(TRIES):
        try:
            options = LaunchOptions(runs_dir=asked.work / "runs", resume=asked.directory.exists())
            outcome = run_plan(plan, options, engine=make_engine("sharing", None), observer=Printed())
        except Locked as error:  # a killed call's launches are given time to save
            Printed().say(str(error))
            time.sleep(GRACE_S)
            continue
        if outcome.stopped_by:
            return outcome.exit_code
        if outcome.exit_code == 0:
            break
    compare = [sys.executable, "-m", "abrun", "compare", str(asked.directory)]
    judged = subprocess.run(compare, check=False, stdin=subprocess.DEVNULL)
    return 0 if judged.returncode in (0, 3, 4, 5) else 1  # any verdict


@dataclass(slots=True, kw_only=True)
class Launch:
    """An experiment's process."""

    asked: Asked
    process: Popen
    started: float = field(default_factory=time.time)


def start(asked: Asked) -> Launch:
    asked.work.mkdir(parents=True, exist_ok=True)
    # 16 runs would otherwise have as many threads each as there are cores
    env = {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONUNBUFFERED": "1"}
    with log_of(asked).open("ab") as log:
        process = start_tied(asked.command, env, dies_by=signal.SIGTERM, stdout=log, stderr=log)
    return Launch(asked=asked, process=process)


def run_all(todo: list[Asked], output: Path, deadline: float) -> None:
    """Launch in order while places are free; say how each ends, and pack it."""
    live: list[Launch] = []
    waiting, last = list(todo), 0.0
    while (waiting or live) and time.time() < deadline:
        for each in [one for one in live if one.process.poll() is not None]:
            live.remove(each)
            ended(each, output)
        free = sum(num_free(todo[0].work / "places", gpu) for gpu in range(max(todo[0].gpus, 1)))
        if waiting and (not live or (free and time.time() - last > BETWEEN_S)):
            live.append(start(waiting.pop(0)))
            last = time.time()
        time.sleep(0.5)
    for each in live:  # a launch passes it on to its runs, which save
        each.process.send_signal(signal.SIGTERM)
    for each in live:
        each.process.wait()
        ended(each, output)
    for asked in waiting:
        print(f"{asked.name}: not begun", flush=True)


def progress(asked: Asked) -> str:
    try:
        plan = make_plan(load_recipe(asked.recipe, asked.overrides))
        states = [run_state(asked.directory, run.name).status for run in plan.runs]
    except AbrunError as error:  # such as none that was begun
        return str(error)
    return f"{states.count('finished')} of {len(states)} runs have finished"


def ended(one: Launch, output: Path) -> None:
    """Say how, and pack what there is: what a machine that is given back would lose."""
    asked, seconds = one.asked, time.time() - one.started
    path, verdict = asked.directory / "report" / "verdict.json", "none"
    if one.process.returncode == 0 and path.exists():
        content = read_verdict_file(path)
        verdict = content.verdict
        for line in verdict_lines(content):
            print(f"{asked.name}: {line}", flush=True)
    else:
        print(f"{asked.name}: no verdict, {progress(asked)}; its log ends:", flush=True)
        log = log_of(asked).read_text(errors="replace").strip().splitlines()
        print("\n".join(f"    {line}" for line in log[-8:]), flush=True)
    print(f"{asked.name}: {seconds:.0f} s beside others, {pack(asked, output)}", flush=True)
    if verdict not in ("none", "INVALID"):  # which a later call may mend
        done_mark(asked).touch()


def verdict_lines(verdict: VerdictFile) -> Iterator[str]:
    """The verdict of each arm with its first reason, each claim with its bound, each planted fault."""
    for arm, section in verdict.arms.items():
        reason = section.reasons[0] if section.reasons else ""
        yield f"{arm} {section.verdict} ({section.num_pairs} pairs) {reason}"
    for claim in verdict.primaries:
        bound = claim.estimate.certified_bound or claim.estimate.limited_interval
        yield f"{claim.arm} {claim.claim.metric} {claim.result}, {claim.claim.margin_text}, bound {bound}"
    for fault in verdict.sensitivity.faults if verdict.sensitivity else ():
        at = f"{fault.caught_by} {fault.metric or ''}"
        yield f"planted {fault.fault}: {fault.verdict} by {at}, {fault.figures}"


def pack(asked: Asked, output: Path) -> str:
    """The experiment without weights, as NAME.tar.xz; a line on it."""
    archive = output / f"{asked.recipe.stem}{SMALL[0]}"
    output.mkdir(parents=True, exist_ok=True)

    def is_small(found: tarfile.TarInfo) -> tarfile.TarInfo | None:
        weights = found.name.endswith(".safetensors") and found.size > SAMPLE
        return None if weights or Path(found.name).name == "checkpoints" else found

    partial = archive.with_name(f"{archive.name}.partial")
    with tarfile.open(partial, "w:xz") as packed:
        packed.add(log_of(asked), f"{asked.name}.log")
        if asked.directory.exists():
            packed.add(asked.directory, asked.recipe.stem, filter=is_small)
    partial.replace(archive)  # what an earlier call has packed stays whole until then
    size = archive.stat().st_size
    wrong = ": TOO LARGE to be brought back" if size > SMALL[1] else ""
    return f"{archive.name} {size / 2**20:.1f} MiB{wrong}"


def done_mark(asked: Asked) -> Path:
    return asked.work / f"{asked.name}.done"


def log_of(asked: Asked) -> Path:
    return asked.work / f"{asked.name}.log"


def places_of(folder: Path, gpu: int) -> list[Path]:
    return sorted(folder.glob(f"gpu-{gpu}-*"))


def num_free(folder: Path, gpu: int) -> int:
    free = [file for path in places_of(folder, gpu) if (file := locked_file(path))]
    _close(free)
    return len(free)


def locked_file(path: Path) -> IO[str] | None:
    """The file, locked until it is closed; None where another process has it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _close(files: list[IO[str]]) -> None:
    for file in files:
        file.close()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="", help="folder of SmolLM2-135M-Instruct; else from the hub")
    parser.add_argument("--only", nargs="*", choices=ORDER, help="these alone, in the order of the list")
    visible = len(find_gpus())
    parser.add_argument("--gpus", type=int, default=visible, help="0: on CPU cores, --slots-per-gpu at once")
    parser.add_argument(
        "--slots-per-gpu", type=int, default=8, help="runs on a GPU at once (PPO: 15 GiB each)"
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/evidence"), help="where experiments lie")
    parser.add_argument("--output", type=Path, default=Path("archives"), help="where archives go")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds, and a minute to save and pack")
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="of every recipe")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        content = json.loads(asked.one)
        raise SystemExit(launch_one(Asked(**{**content, "work": Path(content["work"])})))
    if asked.gpus > visible:
        parser.error(f"--gpus: got {asked.gpus}; this machine has {visible} visible")
    deadline = time.time() + asked.limit
    overrides = [f"model.path={asked.model}"] * bool(asked.model)
    overrides += ["cluster.gpus_per_node=0"] * (asked.gpus == 0) + asked.overrides
    places = asked.work / "places"
    places.mkdir(parents=True, exist_ok=True)
    for gpu in range(max(asked.gpus, 1)):
        for path in places_of(places, gpu):
            path.unlink()
        for slot in range(asked.slots_per_gpu):
            (places / f"gpu-{gpu}-{slot:02d}").touch()
    every = [
        Asked(name=name, rank=rank, gpus=asked.gpus, work=asked.work, overrides=overrides)
        for rank, name in enumerate(ORDER)
        if name in (asked.only or ORDER)
    ]
    run_all([one for one in every if not done_mark(one).exists()], asked.output, deadline)


if __name__ == "__main__":
    main()
