"""`policy.activation_checkpointing: auto`: the least that is computed again with which every arm fits.

Decided once, before anything is stored, from predicted peaks, and the same for all arms that do not state a
value of their own. What a launch hands on, a plan and what is stored of it, has the value in its place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from abrun import store
from abrun.errors import LaunchError, RecipeError
from abrun.launch import experiment_dir_of, make_engine
from abrun.launch.engine import Scheduler
from abrun.launch.experiment import refuse_existing
from abrun.launch.supervisor import refuse_impossible
from abrun.memory.predict import ERROR, GIB, Predicted, device_memory, predict_steps
from abrun.plan import Plan, make_draft, make_plan
from abrun.recipe import CHECKPOINTING, Checkpointing, CommandRecipe, OwnRunConfig, Recipe, dotted

ORDER: tuple[Checkpointing, ...] = ("none", "selective", "full")
ASLEEP_BYTES = GIB // 4  # of vLLM on the same device, while the trainer works (docs/measured.md)

Say = Callable[[str], object]
Decision = dict[str, Any]  # as experiment.json keeps it


def planned(
    recipe: Recipe | CommandRecipe,
    runs_dir: Path,
    name: str | None = None,
    *,
    scheduler: Scheduler | None,
    launcher: str | None = None,
    jobs: int | None = None,
    resume: bool = False,
    asked_memory: str | None = None,
    dry_run: bool = False,
    say: Say = lambda line: None,
) -> Plan:
    """The plan of a recipe, with what it leaves open decided; options as of `launch_or_hand_over`.

    To resume, it is what the first launch decided. Raises RecipeError or LaunchError where there is no such
    launcher, where nothing can be decided or fits, and, but for a dry run, at once what the launch would
    refuse after it.
    """
    engine = scheduler or make_engine("local" if launcher is None else launcher, jobs)
    if asked_memory is not None:
        device_memory(asked_memory)  # refused at once, also where it decides nothing
    if not recipe.is_open:
        if asked_memory is not None and not dry_run:
            raise RecipeError(
                f"--device-memory: got it without --dry-run, or {CHECKPOINTING}: auto, of which it is; add "
                "one of them, or drop it"
            )
        return make_plan(recipe)
    draft = make_draft(recipe)
    experiment_dir = experiment_dir_of(draft, runs_dir, name)
    if resume:
        return make_plan(recipe.checkpointing(_decided_before(experiment_dir)))
    if not dry_run:
        refuse_impossible(draft, engine.refusals(draft))
        refuse_existing(experiment_dir)
    decision = decide(recipe, asked_memory, here=scheduler is None, say=say)
    plan = make_plan(recipe.checkpointing(decision["value"]))
    return replace(plan, decided={CHECKPOINTING: decision})


def decide(
    recipe: Recipe | CommandRecipe, asked_memory: str | None, *, here: bool, say: Say = lambda line: None
) -> Decision:
    """What an open recipe becomes, and why; `here`: its devices are this machine's."""
    configs = _open_configs(recipe.checkpointing("full"))
    if not configs:
        why = "auto is none: no arm that leaves it open trains on GPUs, whose memory could run out"
        return {"asked": "auto", "value": "none", "why": why, "device_bytes": None, "candidates": []}
    _refuse_unpredictable(recipe.name, configs)
    device_bytes = device_memory(asked_memory) if here or asked_memory is not None else None
    if device_bytes is None:
        whose = "this machine has no GPU" if here else "the GPUs of a cluster are not known here"
        raise LaunchError(
            f"{recipe.name}: {CHECKPOINTING}: got 'auto', and {whose}; add --device-memory with what one "
            "has, such as 80GiB or h200, or give none, selective or full"
        )
    margin, candidates = ERROR, list[dict[str, Any]]()
    for value in _candidates(recipe, configs):
        say(f"{CHECKPOINTING}: auto: predicting the peaks of {', '.join(configs)} with {value}")
        found = predict_steps(_open_configs(recipe.checkpointing(value)), device_bytes)
        peaks, margin = _peaks(found), max(one.error_below for one in found)
        highest = max(one["peak_bytes"] + one["asleep_bytes"] for one in peaks.values())
        fits = highest <= (1 - margin) * device_bytes
        candidates.append({"value": value, "fits": fits, "highest_bytes": highest, "peaks": peaks})
        if fits:
            break
    last, has = candidates[-1], f"and a device has {device_bytes / GIB:.1f} GiB"
    if not last["fits"] and last["highest_bytes"] * (1 - ERROR) > device_bytes:
        raise LaunchError(
            f"{recipe.name}: {CHECKPOINTING}: got 'auto', and nothing fits: predicted peaks {_told([last])}, "
            f"{has}; use smaller microbatches (policy.micro_batch_tokens or micro_batch_size), more ranks, "
            "more of policy.backend's parallelism or a fused policy.logprobs.impl"
        )
    left = f", of which {margin:.0%} stay free"
    if not last["fits"]:
        left = f": nothing leaves {margin:.0%} of it free, and runs may run out of memory"
    return {
        "asked": "auto",
        "value": last["value"],
        "why": f"auto is {last['value']}: predicted peaks {_told(candidates)}, {has}{left}",
        "device_bytes": device_bytes,
        "margin": margin,
        "candidates": candidates,
    }


def _candidates(recipe: Recipe | CommandRecipe, configs: Mapping[str, OwnRunConfig]) -> list[Checkpointing]:
    """In their order; selective where all is compiled, recipe and arms."""
    compiled = isinstance(recipe, Recipe) and recipe.policy.compile
    compiled = compiled and all(config.policy.compile for config in configs.values())
    return [value for value in ORDER if compiled or value != "selective"]


def _open_configs(recipe: Recipe | CommandRecipe) -> dict[str, OwnRunConfig]:
    """Of the arms on GPUs that have the recipe's value, and none of their own."""
    configs = {
        arm: recipe.run_config(arm)
        for arm, change in recipe.arms.items()
        if CHECKPOINTING not in dotted(change)
    }
    return {
        arm: config
        for arm, config in configs.items()
        if isinstance(config, OwnRunConfig) and config.cluster.gpus_per_node
    }


def _refuse_unpredictable(name: str, configs: Mapping[str, OwnRunConfig]) -> None:
    for arm, config in configs.items():
        if config.policy.backend.type != "dtensor":
            raise LaunchError(
                f"{name}: {CHECKPOINTING}: got 'auto' with arms.{arm} on policy.backend.type "
                f"{config.policy.backend.type!r}, whose step cannot be predicted; give none or full"
            )


def _peaks(found: Sequence[Predicted]) -> dict[str, dict[str, Any]]:
    return {
        one.arm: {
            "num_sequences": one.point.num_sequences,
            "length": one.point.length,
            "phase": one.highest[0],
            "peak_bytes": one.highest[1],
            "asleep_bytes": 0 if one.engine_bytes is None else ASLEEP_BYTES,
        }
        for one in found
    }


def _told(candidates: list[dict[str, Any]]) -> str:
    """`with none 151.2 (baseline), 60.1 (treatment); with full ... GiB`."""
    return "; ".join(
        f"with {one['value']} "
        + ", ".join(f"{peak['peak_bytes'] / GIB:.1f} GiB ({arm})" for arm, peak in one["peaks"].items())
        for one in candidates
    )


def _decided_before(experiment_dir: Path) -> Checkpointing:
    """What an experiment was launched with."""
    recipe = store.open_experiment(experiment_dir).get("recipe", {})
    policy = recipe.get("policy") if isinstance(recipe.get("policy"), dict) else {}
    value = policy.get("activation_checkpointing")
    if value not in ORDER:
        raise LaunchError(
            f"{experiment_dir}: --resume: its recipe has no {CHECKPOINTING} (got {value!r}), and this one "
            "says auto; give the one of none, selective and full that it was launched with"
        )
    return value
