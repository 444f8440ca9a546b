"""What a memory profile is to measure: the arms of a recipe, at every combination of sizes."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.preflight.machine import this_machine
from abrun.experiment.preflight.settings import triton_refusal
from abrun.experiment.probe import refuse_other_machines
from abrun.reasons import Code
from abrun.recipe.algorithms import Dpo
from abrun.recipe.experiment import BASELINE, Declared, load_recipe
from abrun.recipe.reading import parse_yaml
from abrun.recipe.refusals import validated
from abrun.recipe.run import OwnRunConfig, not_built

COMMAND = "abrun memory-profile"
MASTER_DTYPE = "float32"  # of weights, gradients and AdamW's moments, as abrun trains
SHARED = (
    "policy.share_prompts: not in these figures, whose sequences share nothing; in a run a budget of tokens "
    "is filled with it as without, in fewer microbatches"
)
DEFAULT_LENGTHS = (128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A recipe with a value for each key of the sweep."""

    recipe: Declared
    swept: tuple[tuple[str, Any], ...] = ()

    def configs(self, *, here: bool = True) -> dict[str, OwnRunConfig]:
        """The arms' configurations, the baseline's first.

        Raises LaunchError, one line, for what cannot be measured, or (`here`) not on this machine.
        """
        configs: dict[str, OwnRunConfig] = {}
        for arm in sorted(self.recipe.arms, key=lambda arm: arm != BASELINE):
            config = self.recipe.run_config(arm)
            if not isinstance(config, OwnRunConfig):
                raise LaunchError(Code.MEASURES_ABRUN_TRAINER(recipe=self.recipe.name, arm=arm))
            for line in not_built(config):
                raise LaunchError(Code.OF_SUBJECT(subject=f"{self.recipe.name}: arms.{arm}", problem=line))
            configs[arm] = config
        for config in configs.values() if here else ():
            refuse_other_machines(config)
        return configs


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The log-prob head alone, without a recipe: every kernel that this machine can run."""

    hidden_size: int
    vocab_size: int

    @property
    def name(self) -> str:
        return f"head {self.hidden_size:,} x {self.vocab_size:,}"

    def kernels(self, on_gpu: bool) -> dict[str, dict[str, Any]]:
        """By name what `policy.logprobs` would say; the dense one first."""
        fused = ["chunked", *(["triton"] if triton_refusal(on_gpu=on_gpu) is None else [])]
        kernels = {"logits": {"impl": "logits", "one_pass": False}}
        for impl in fused:
            kernels |= {
                impl: {"impl": impl, "one_pass": False},
                f"{impl}-one-pass": {"impl": impl, "one_pass": True},
            }
        return kernels

    @property
    def config(self) -> OwnRunConfig:
        """What its processes are started by: a run on one device."""
        content = {
            "algorithm": {"type": "sft"},
            "model": {"preset": "qwen2-tiny"},
            "task": {"type": "arithmetic"},
            "steps": 1,
            "cluster": {"gpus_per_node": min(len(this_machine().gpus), 1)},
        }
        return validated(OwnRunConfig, content, "head")


def head_of(hidden: int | None, vocab: int | None, given: Sequence[str]) -> Head:
    """The head that is asked for without a recipe. `given`: options that need one. Raises RecipeError."""
    if given:
        raise RecipeError(Code.OPTION_NEEDS_RECIPE(option=given[0]))
    if hidden is None or vocab is None:
        raise RecipeError(Code.MEMORY_PROFILE_NEEDS_RECIPE())
    return Head(hidden_size=hidden, vocab_size=vocab)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which cells are measured, and how."""

    name: str
    variants: Sequence[Variant]
    lengths: Sequence[int] = DEFAULT_LENGTHS  # ascending, tokens of a sequence, prompt and completion
    sequences: Sequence[int] = ()  # ascending, of a rank's microbatch; none: the baseline's, or 1 (dpo: 2)
    rollouts: bool = True  # sample once, where the recipe samples
    budget_bytes: int | None = None  # as if a device had no more
    longest: Literal["length", "num_sequences"] | None = None  # what to look for the most of
    master_dtype: str = MASTER_DTYPE  # of a prediction

    def unseen(self) -> str:
        """What its arms do that sequences without a prompt in common do not show; empty: nothing."""
        each = (config for variant in self.variants for config in variant.configs(here=False).values())
        return SHARED if any(config.policy.share_prompts for config in each) else ""

    def refuse_endless_search(self, config: OwnRunConfig) -> None:
        """Raises LaunchError where nothing would tell that memory ran out, but the machine's end."""
        if self.longest and self.budget_bytes is None and not config.cluster.gpus_per_node:
            raise LaunchError(Code.SEARCH_NEEDS_BUDGET())

    def num_sequences(self, configs: dict[str, OwnRunConfig]) -> Sequence[int]:
        """Raises LaunchError where a pair would be cut apart."""
        together = 2 if any(isinstance(config.algorithm, Dpo) for config in configs.values()) else 1
        sequences = self.sequences or (configs[BASELINE].policy.micro_batch_size or together,)
        for number in sequences:
            if number % together:
                raise LaunchError(Code.SEQUENCES_ODD(got=number))
        return sequences


def variants_of(path: Path, overrides: Sequence[str], sweeps: Sequence[str]) -> list[Variant]:
    """The recipe at every combination of the values of `KEY=V1,V2,...`. Raises RecipeError, one line."""
    base = load_recipe(path, overrides)
    keys: dict[str, list[Any]] = {}
    for key, values in map(_swept, sweeps):
        if key in keys:
            raise RecipeError(Code.SWEEP_KEY_TWICE(key=key))
        keys[key] = values
    for key in keys:
        for arm, change in base.arms.items():
            own = next((one for one in change if one == key or one.startswith(f"{key}.")), None)
            own = own or next((one for one in change if key.startswith(f"{one}.")), None)
            if own:
                raise RecipeError(Code.SWEEP_KEY_OF_ARM(key=key, arm=arm, arm_key=own))
    variants = []
    for values in itertools.product(*keys.values()):
        swept = tuple(zip(keys, values, strict=True))
        recipe = load_recipe(path, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in swept)])
        variants.append(Variant(recipe=recipe, swept=swept))
    return variants


def _swept(text: str) -> tuple[str, list[Any]]:
    key, equals, values = text.partition("=")
    found = parse_yaml(f"[{values}]", f"--sweep {key}") if equals and values.strip() else []
    if not (key and isinstance(found, list) and found):
        raise RecipeError(Code.SETTING_REFUSED(field="--sweep", got=repr(text)))
    return key, list(found)
