"""Run directories of the quickstart's settings as a launcher writes them, and what a test reads of them."""

import os
from pathlib import Path

import yaml

from abrun.recipe.experiment import load_recipe
from abrun.recipe.merging import merge
from abrun.recipe.reading import nested
from abrun.recipe.run import OwnRunConfig
from abrun.runs.launches import write_config
from abrun.runs.layout import RunName
from abrun.runs.rundir import RunDir

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
SHORT = ("steps=12", "algorithm.prompts_per_step=4", "checkpoint.every=3", "warm_start=null")
ONE_LAYER = "model.shape={num_hidden_layers: 1}"  # of three, which take twice the time
VOLATILE = ("timing/", "performance/")


def run_config(*overrides: str, arm: str = "baseline") -> OwnRunConfig:
    """One arm of the quickstart recipe, shortened, with `key=value` overrides laid over it.

    Its model has one layer unless an override names another.
    """
    config = load_recipe(QUICKSTART).run_config(arm).model_dump(mode="json")
    has_own_model = any(override.startswith("model") for override in overrides)
    for override in (*SHORT, *([] if has_own_model else [ONE_LAYER]), *overrides):
        key, _, value = override.partition("=")
        config = merge(config, nested({key: yaml.safe_load(value)}))
    return OwnRunConfig.model_validate(config)


def make_run(
    directory: Path, config: OwnRunConfig, *, seed: int = 0, initial_weights: Path | None = None
) -> Path:
    """Write what a launcher tells a job; returns the directory."""
    weights = os.path.relpath(initial_weights, directory) if initial_weights else None
    write_config(
        RunDir(directory), "x", RunName(arm="baseline", seed=seed), config.model_dump(mode="json"), weights
    )
    return directory


def metric_values(directory: Path) -> dict[str, list[str]]:
    """Every metric that does not depend on the clock: its values over the steps, exact to the last bit."""
    metrics = RunDir(directory).metrics()
    return {
        key: [f"{step} {value.hex()}" for step, value in zip(one.steps, one.values.tolist(), strict=True)]
        for key, one in metrics.items()
        if not key.startswith(VOLATILE)
    }


def events(directory: Path) -> list[str]:
    return [row["event"] for row in RunDir(directory).events()]
