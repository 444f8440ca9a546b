"""What a page of docs/evidence/ says of an experiment: read from its files once, and committed.

A record is text and numbers for people, so that its page stays what it was whatever verdict.json becomes.
"""

import io
import json
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import TypeAdapter

from abrun.compare import REPORT, freeze_arm
from abrun.compare.read.experiment import Experiment
from abrun.compare.read.stored import load_experiment
from abrun.compare.show.completions import Completions
from abrun.compare.show.context import context
from abrun.compare.show.next_step import RUNS_DIR, NextStep, next_steps
from abrun.compare.show.planted import advice, rows
from abrun.compare.show.report import OWN_FIGURES, claim_cells, claim_columns
from abrun.errors import ComparisonError
from abrun.recipe import dotted, load_recipe, stored_recipe
from abrun.store import decode, open_experiment, read_json, write_file, write_json

RECIPES = "recipes/evidence"
RECORD, VERDICT, REFERENCE = "record.json", "verdict.json", "reference.json"
PUBLIC = 0o644
LARGEST_PICTURE = 150_000  # bytes
NUM_COLORS = 64  # of a picture of lines and bands


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One treatment against the baseline."""

    name: str
    title: str  # `EXPERIMENT`, or one of several: `EXPERIMENT: ARM`
    verdict: str
    reasons: list[str]
    claims: list[list[str]]  # a row each, in the order of `Record.claim_columns`
    next_steps: list[NextStep]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the arms said to the same prompts at one step."""

    step: int
    prompts: list[tuple[str, list[tuple[str, float | None] | None]]]  # text and reward by arm; None: not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a page says of an experiment: read from its files once, and committed."""

    name: str
    command: str
    ran: str | None
    hardware: str | None
    seeds: list[int]
    num_runs: int
    device: str
    device_hours: float | None  # None: some run does not say how long it took
    arms: list[Arm]
    claim_columns: list[str]
    apart: list[list[str]]  # in the order of OF_METRICS
    faults: list[list[str]]  # planted by `controls.faults`, in the order of the report's columns
    missed: list[str]  # of those that were not caught, what could show them
    samples_seed: int | None
    samples_arms: list[str]
    said: list[Said]
    pictures: list[str]
    no_reference: str | None  # why none could be frozen


def read_record(folder: Path) -> Record:
    """Raises StoreError where there is none."""
    return TypeAdapter(Record).validate_python(_decoded(read_json(folder / RECORD)))


def read_verdict(folder: Path) -> dict[str, Any]:
    """The verdict file beside the record. Raises StoreError where there is none."""
    return _decoded(read_json(folder / VERDICT))


def write_record(directory: Path, recipe: Path, folder: Path) -> Record:
    """Of an experiment that was judged, what its page is made of: record, verdict, reference and pictures."""
    experiment = replace(load_experiment(directory), directory=RUNS_DIR / recipe.stem)  # no one's own folder
    content = _judged(directory)
    command = _command(directory, recipe)
    beside = context(experiment, content, command)
    runs = [*experiment.runs.values(), *experiment.controls.values()]
    seconds = [run.device_s for run in runs if run.device_s is not None]
    record = Record(
        name=recipe.stem,
        command=command,
        ran=beside.ran,
        hardware=beside.environment,
        seeds=list(experiment.arm(experiment.baseline)),
        num_runs=len(runs),
        device=runs[0].device,
        device_hours=sum(seconds) / 3600 if len(seconds) == len(runs) else None,
        arms=[_arm(recipe.stem, arm, experiment, content, command) for arm in content["arms"]],
        claim_columns=claim_columns(content) if content["primaries"] else [],
        apart=[_apart(one, several=len(content["arms"]) > 1) for one in content["divergence"]],
        faults=[list(row) for row in rows(content["sensitivity"])] if content["sensitivity"] else [],
        missed=list(advice(content["sensitivity"])) if content["sensitivity"] else [],
        samples_seed=beside.completions.seed if beside.completions else None,
        samples_arms=[experiment.arms[one] for one in beside.completions.arms] if beside.completions else [],
        said=_said(beside.completions),
        pictures=_pictures(directory / REPORT, folder),
        no_reference=_frozen(experiment, folder / REFERENCE),
    )
    write_json(folder / VERDICT, content, mode=PUBLIC)
    write_json(folder / RECORD, asdict(record), mode=PUBLIC)
    return record


def _judged(directory: Path) -> dict[str, Any]:
    """The report's verdict.json, without the names of hosts."""
    path = directory / REPORT / VERDICT
    if not path.is_file():
        raise ComparisonError(f"{path}: no such file; judge the experiment first: abrun compare {directory}")
    content = read_json(path)
    hosts = {host for one in content["environments"] for host in one["environment"].pop("hosts", ())}
    text = json.dumps(content)
    for number, host in enumerate(sorted(hosts), 1):
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", f"host-{number}", text)
    return _decoded(json.loads(text))


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decoded(each) for key, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else decode(value)


def _arm(
    experiment_name: str, arm: str, experiment: Experiment, content: Mapping[str, Any], command: str
) -> Arm:
    section = content["arms"][arm]
    claims = [one for one in content["primaries"] if one["arm"] == arm]
    alone = {key: _of_arm(value, arm) for key, value in content.items()}
    alone |= {"arms": {arm: section}, "verdict": section["verdict"]}
    return Arm(
        name=arm,
        title=title(experiment_name, arm, content["arms"]),
        verdict=section["verdict"],
        reasons=section["reasons"],
        claims=[claim_cells(one) for one in claims],
        next_steps=next_steps(replace(experiment, arms=(experiment.baseline, arm)), alone, command),
    )


def _of_arm(value: Any, arm: str) -> Any:
    """A section of verdict.json, if it is a list of what belongs to arms, as if there were no other."""
    of_arms = isinstance(value, list) and value and isinstance(value[0], dict) and "arm" in value[0]
    return [one for one in value if one["arm"] == arm] if of_arms else value


def title(experiment: str, arm: str, arms: Collection[str]) -> str:
    """What an arm's result is called."""
    return experiment if len(arms) == 1 else f"{experiment}: {arm}"


def _apart(one: Mapping[str, Any], *, several: bool) -> list[str]:
    """Mean distances over steps, of the treatment from its baseline and of what else lies apart."""
    metric = f"{one['arm']}: {one['metric']}" if several else one["metric"]
    ulp = one["ulp"]["mean_difference"] if one["ulp"] else None
    means = (one["mean_difference"], one["aa_mean_difference"], ulp, one["seed_spread"])
    first = "-" if one["first_step_apart"] is None else str(one["first_step_apart"])
    return [metric, *("-" if mean is None else f"{mean:.3g}" for mean in means), first]


def _said(kept: Completions | None) -> list[Said]:
    if kept is None or not kept.steps:
        return []
    ends = kept.steps[:1] + kept.steps[1:][-1:]
    return [
        Said(
            step=step,
            prompts=[
                (one.prompt, [(said["text"], said["reward"]) if said else None for said in one.said])
                for one in prompts
            ],
        )
        for step, prompts in ends
    ]


def _command(directory: Path, recipe: Path) -> str:
    """What launches it: the recipe, and what it was told to do otherwise. A folder is whoever's it is."""
    words = ["abrun", "launch", f"{RECIPES}/{recipe.name}"]
    ran = dotted(stored_recipe(open_experiment(directory)["recipe"]).model_dump(mode="json"))
    written = dotted(load_recipe(recipe).model_dump(mode="json"))
    for key, value in ran.items():
        if key not in written or written[key] != value:
            is_folder = isinstance(value, str) and value.startswith("/")
            text = "FOLDER" if is_folder else value if isinstance(value, str) else json.dumps(value)
            words += ["--set", f"{key}={text}"]
    return shlex.join(words)


def _pictures(report: Path, folder: Path) -> list[str]:
    """The report's, in few colours; those of metrics first."""
    found = sorted(report.glob("*.png"), key=lambda path: (path.stem in OWN_FIGURES, path.stem))
    for path in found:
        write_file(folder / path.name, _small(path), mode=PUBLIC)
    return [path.name for path in found]


def _small(path: Path) -> bytes:
    image = Image.open(path).convert("RGB")
    while True:
        drawing = io.BytesIO()
        image.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(drawing, "PNG", optimize=True)
        if len(drawing.getvalue()) <= LARGEST_PICTURE:
            return drawing.getvalue()
        image = image.resize((image.width * 4 // 5, image.height * 4 // 5))


def _frozen(experiment: Experiment, path: Path) -> str | None:
    """Freezes the baseline; returns why that cannot be."""
    try:
        freeze_arm(experiment, experiment.baseline, path)
    except ComparisonError as error:
        path.unlink(missing_ok=True)  # of an earlier run
        return str(error)
    return None
