"""`policy.activation_checkpointing: auto`: what it becomes, what is said and kept of it, what is refused."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from abrun import cli, store
from abrun.compare import compare_sources
from abrun.compare.read.sources import Reading
from abrun.errors import LaunchError, RecipeError
from abrun.implementations import LAUNCHERS
from abrun.memory import recompute
from abrun.memory.cells import Point
from abrun.memory.predict import GIB, Predicted, _predicted
from abrun.memory.recompute import ASLEEP_BYTES, decide, planned
from abrun.memory.step import own_sequences
from abrun.memory.trace import longest
from abrun.recipe import CHECKPOINTING, CommandRecipe, OwnRunConfig, Recipe, load_recipe
from tests.launch.fakes import FAKE

SMALL = Path(__file__).parents[1] / "launch" / "small.yaml"
AUTO = f"{CHECKPOINTING}=auto"
ON_GPUS = [AUTO, "cluster={gpus_per_node: 1}"]
Peaks = dict[str, dict[str, float]]  # GiB by what is computed again and arm


@pytest.fixture
def predicts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Peaks], list[tuple[str, str]]]:
    """Has predictions say these peaks; returns the list of what they are asked, which grows."""

    def say(peaks: Peaks) -> list[tuple[str, str]]:
        asked: list[tuple[str, str]] = []

        def predict_steps(configs: dict[str, OwnRunConfig], device_bytes: int) -> list[Predicted]:
            found = []
            for arm, config in configs.items():
                value = config.policy.activation_checkpointing
                asked.append((value, arm))
                by_phase = {"forward_backward": {"activations": int(peaks[value][arm] * GIB)}}
                row = {"by_phase": by_phase, "experts": "num_experts" in config.model.architecture}
                row["vllm"] = {"weights": 1, "cache": 1} if config.rollout.engine == "vllm" else None
                at = Point(length=64, num_sequences=own_sequences(config))
                found.append(_predicted(arm, config, at, row, device_bytes))
            return found

        monkeypatch.setattr(recompute, "predict_steps", predict_steps)
        return asked

    return say


def of(baseline: float, treatment: float) -> dict[str, float]:
    return {"baseline": baseline, "treatment": treatment}


def recipe(*sets: str) -> Recipe | CommandRecipe:
    return load_recipe(SMALL, [*ON_GPUS, *sets])


COMPILED = "policy.compile=true"
PEAKS = {"none": of(95, 50), "selective": of(80, 40), "full": of(60, 30)}


@pytest.mark.parametrize(
    ("sets", "memory", "value"),
    [
        ([], "106GiB", "none"),
        ([], "105GiB", "full"),
        ([COMPILED], "105GiB", "selective"),
        ([COMPILED], "88GiB", "full"),
        ([COMPILED, "arms.treatment={policy.compile: false}"], "105GiB", "full"),
        (["arms.treatment={policy.compile: true}"], "105GiB", "full"),
        (["algorithm={type: ppo, prompts_per_step: 16}"], "106GiB", "full"),
        (["algorithm={type: ppo, prompts_per_step: 16}"], "112GiB", "none"),
        (["model={preset: qwen3-moe-tiny}"], "106GiB", "full"),
    ],
)
def test_the_least_that_leaves_the_margin_to_every_arm(
    predicts: Callable[[Peaks], Any], sets: list[str], memory: str, value: str
) -> None:
    asked = predicts(PEAKS)
    decision = decide(recipe(*sets), memory, here=True)
    assert decision["value"] == value and [one["fits"] for one in decision["candidates"]][-1]
    tried = list(dict.fromkeys(one for one, _ in asked))
    assert tried == [one["value"] for one in decision["candidates"]]  # and nothing after what fits
    assert tried[-1] == value and tried[0] == "none"


def test_an_arm_with_a_value_of_its_own_keeps_it_and_is_not_asked(predicts: Callable[[Peaks], Any]) -> None:
    asked = predicts({"none": {"baseline": 95}, "full": {"baseline": 60}})
    plan = planned(
        recipe(f"arms.treatment={{{CHECKPOINTING}: none}}"),
        Path("runs"),
        scheduler=None,
        asked_memory="80GiB",
        dry_run=True,
    )
    assert asked == [("none", "baseline"), ("full", "baseline")]
    assert plan.treatment_diff["treatment"] == {CHECKPOINTING: ("full", "none")}


def test_vllm_that_sleeps_beside_it_takes_its_part(predicts: Callable[[Peaks], Any]) -> None:
    fits = {"none": of(90 - ASLEEP_BYTES / 2 / GIB, 1), "full": of(1, 1)}
    predicts(fits)
    assert decide(recipe(), "100GiB", here=True)["value"] == "none"
    assert decide(recipe("rollout={engine: vllm}"), "100GiB", here=True)["value"] == "full"


def test_what_cannot_fit_is_refused_and_what_is_too_close_to_tell_is_said(
    predicts: Callable[[Peaks], Any],
) -> None:
    predicts({"none": of(200, 1), "full": of(109, 80)})
    decision = decide(recipe(), "100GiB", here=True)
    assert decision["value"] == "full" and not decision["candidates"][-1]["fits"]
    assert decision["why"] == (
        "auto is full: predicted peaks with none 200.0 GiB (baseline), 1.0 GiB (treatment); with full 109.0 "
        "GiB (baseline), 80.0 GiB (treatment), and a device has 100.0 GiB: nothing leaves 10% of it free, "
        "and runs may run out of memory"
    )
    with pytest.raises(LaunchError) as refused:
        decide(recipe(), "98GiB", here=True)
    assert str(refused.value).startswith(
        f"small: {CHECKPOINTING}: got 'auto', and nothing fits: predicted peaks with full 109.0 GiB "
        "(baseline), 80.0 GiB (treatment), and a device has 98.0 GiB; use smaller microbatches"
    )


@pytest.mark.parametrize(
    ("sets", "here", "said"),
    [
        ([], True, "got 'auto', and this machine has no GPU; add --device-memory with what one has"),
        ([], False, "got 'auto', and the GPUs of a cluster are not known here; add --device-memory"),
        (
            ["policy.backend.type=megatron"],
            True,
            "with arms.baseline on policy.backend.type 'megatron', whose",
        ),
    ],
)
def test_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch, sets: list[str], here: bool, said: str) -> None:
    monkeypatch.setenv("PATH", "")  # without nvidia-smi
    with pytest.raises(LaunchError) as refused:
        decide(recipe(*sets), None, here=here)
    assert said in str(refused.value) and "none" in str(refused.value) and "\n" not in str(refused.value)


def test_on_cpu_cores_nothing_is_computed_again(predicts: Callable[[Peaks], Any]) -> None:
    asked = predicts({})
    decision = decide(load_recipe(SMALL, [AUTO]), None, here=True)
    assert decision["value"] == "none" and "no arm that leaves it open trains on GPUs" in decision["why"]
    assert not asked


@pytest.fixture
def abrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """A command in an empty folder, on two pretended GPUs, by the fake trainer: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(LAUNCHERS, "local", FAKE[1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["abrun", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        said = capsys.readouterr()
        return int(str(exited.value.code)), " ".join(said.out.split()), " ".join(said.err.split())

    return run


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def test_the_runs_get_what_was_decided_and_the_experiment_keeps_why(
    abrun: Callable[..., tuple[int, str, str]], predicts: Callable[[Peaks], Any], tmp_path: Path
) -> None:
    predicts({"none": of(95, 50), "full": of(60, 30)})
    command = ("launch", SMALL, *sets(*ON_GPUS), "--device-memory", "80GiB", "--no-compare")
    code, said, _ = abrun(*command, "--seeds", "0,1")
    why = (
        "auto is full: predicted peaks with none 95.0 GiB (baseline), 50.0 GiB (treatment); with full 60.0 "
        "GiB (baseline), 30.0 GiB (treatment), and a device has 80.0 GiB, of which 10% stay free"
    )
    assert code == 0 and said.count(f"{CHECKPOINTING}: {why}") == 1
    experiment_dir = tmp_path / "runs" / "small"
    kept = store.open_experiment(experiment_dir)
    decided = kept["decided"][CHECKPOINTING]
    assert decided["asked"] == "auto" and decided["value"] == "full" and decided["why"] == why
    assert decided["device_bytes"] == 80 * GIB and decided["margin"] == 0.1
    assert decided["candidates"][1]["peaks"]["treatment"] == {
        "num_sequences": 128,
        "length": 64,
        "phase": "forward_backward",
        "peak_bytes": 30 * GIB,
        "asleep_bytes": 0,
    }
    assert kept["recipe"]["policy"]["activation_checkpointing"] == "full"
    configs = [
        store.RunDir(store.run_dir(experiment_dir, name)).record().config
        for name in store.planned_runs(experiment_dir)
    ]
    assert {config["policy"]["activation_checkpointing"] for config in configs} == {"full"}
    comparison = compare_sources([str(experiment_dir)], Reading(), formats=[])
    assert comparison.as_json()["notes"][0] == f"{CHECKPOINTING}: {why}"

    asked = predicts({})  # resumed with a seed more, it is what it was, whatever the memory is now
    code, said, _ = abrun(
        *command[:-3], "--device-memory", "1GiB", "--no-compare", "--seeds", "0-2", "--resume"
    )
    assert code == 0 and not asked
    again = store.open_experiment(experiment_dir)
    assert again["decided"] == kept["decided"] and len(again["runs"]) == 6
    assert again["recipe"]["policy"]["activation_checkpointing"] == "full"

    code, _, said = abrun(*command)  # refused before anything is predicted
    assert code == 2 and "an experiment is here already" in said and not asked


def test_what_a_launch_would_refuse_is_said_before_minutes_of_predictions(
    abrun: Callable[..., tuple[int, str, str]], predicts: Callable[[Peaks], Any], tmp_path: Path
) -> None:
    asked = predicts(PEAKS)
    three = ("cluster={gpus_per_node: 4}", "algorithm.prompts_per_step=32")
    code, _, said = abrun("launch", SMALL, *sets(AUTO, *three), "--device-memory", "80GiB")
    assert code == 2 and "this machine has 2 visible GPUs" in said and not asked
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_shows_what_it_would_be(
    abrun: Callable[..., tuple[int, str, str]], predicts: Callable[[Peaks], Any]
) -> None:
    asked = predicts(PEAKS)
    command = ("launch", SMALL, *sets(*ON_GPUS), "--dry-run", "--device-memory", "120GiB")
    code, said, _ = abrun(*command)
    assert code == 0 and "auto is none: predicted peaks with none 95.0 GiB (baseline)" in said
    assert len(asked) == 2  # nothing is predicted twice
    code, said, _ = abrun(*command, "--json")
    assert code == 0 and json.loads(said)["decided"][CHECKPOINTING]["value"] == "none"


def test_sensitivity_decides_for_the_baseline(
    abrun: Callable[..., tuple[int, str, str]], predicts: Callable[[Peaks], Any], tmp_path: Path
) -> None:
    asked = predicts({"none": {"baseline": 95}, "full": {"baseline": 60}})
    faulty = ("--faults", "flipped_advantages", "--device-memory", "80GiB")
    assert abrun("sensitivity", SMALL, *sets(*ON_GPUS), *faulty)[0] == 0
    assert asked == [("none", "baseline"), ("full", "baseline")]
    runs = store.planned_runs(tmp_path / "runs" / "small-sensitivity")
    assert {name.arm for name in runs} > {"baseline"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["memory-profile", SMALL, *sets(AUTO)], "got 'auto', which abrun launch alone decides; give none,"),
        (["memory-profile", SMALL, *sets(AUTO), "--predict"], "which abrun launch alone decides; give none,"),
        (["export", SMALL, *sets(AUTO), "--to", "jobset"], "which abrun launch alone decides; give none,"),
        (
            ["launch", SMALL, "--dry-run", "--device-memory", "h201"],
            "--device-memory: got 'h201'; allowed: a size such as 80GiB",
        ),
        (
            ["launch", SMALL, "--device-memory", "h200"],
            "--device-memory: got it without --dry-run, or policy.",
        ),
        (["sensitivity", SMALL, "--device-memory", "h200"], "--device-memory: got it without --dry-run, or"),
        (
            ["launch", SMALL, *sets(AUTO), "--device-memory", "lots"],
            "--device-memory: got 'lots'; allowed: a",
        ),
        (
            ["launch", SMALL, *sets(f"arms.treatment={{{CHECKPOINTING}: auto}}")],
            "got 'auto', which is decided for all arms alike; say it outside of arms",
        ),
    ],
)
def test_other_commands_say_what_to_write(
    abrun: Callable[..., tuple[int, str, str]], command: list[Any], said: str
) -> None:
    code, _, error = abrun(*command)
    assert code == 2 and said in error


def test_a_plan_of_seeds_needs_no_memory(abrun: Callable[..., tuple[int, str, str]]) -> None:
    assert abrun("plan", SMALL, *sets(*ON_GPUS), "--sigma", "0.02")[0] == 0


def test_no_run_is_ever_told_auto() -> None:
    config = recipe().checkpointing("none").run_config("baseline").model_dump()
    config["policy"]["activation_checkpointing"] = "auto"
    with pytest.raises(ValueError, match="Input should be 'none', 'selective' or 'full'"):
        OwnRunConfig.model_validate(config)
    with pytest.raises(RecipeError, match="which abrun launch alone decides"):
        recipe().run_config("baseline")


# --- the step that is predicted ---


@pytest.mark.parametrize(
    ("sets", "num_sequences", "tokens"),
    [
        ([], 128, 12),  # `37+58=`, and 6 new tokens
        (["policy.micro_batch_size=4"], 4, 12),
        (["algorithm.minibatches_per_step=2"], 64, 12),
        (["policy.packing=true", "policy.micro_batch_tokens=512"], 1, 512),
        (["policy.packing=true", "policy.micro_batch_tokens=4"], 1, 6),
        (["algorithm={type: sft}"], 32, 10),  # `37+58=`, `195` and the end
        (["algorithm={type: dpo}"], 64, 10),
        (["algorithm={type: dpo}", "policy={packing: true, micro_batch_tokens: 512}"], 2, 256),
    ],
)
def test_a_step_is_as_large_as_the_run_makes_it(sets: list[str], num_sequences: int, tokens: int) -> None:
    claims = "compare.primary=[{metric: train/loss, window: last 20%, margin: 0.05}]"
    config = load_recipe(SMALL, [*sets, claims]).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    assert (own_sequences(config), longest(config)) == (num_sequences, tokens)


@pytest.mark.slow
def test_a_real_prediction_decides(abrun: Callable[..., tuple[int, str, str]]) -> None:
    """A step of a tiny model, 128 sequences of 506 tokens, three times traced."""
    larger = ("rollout.max_new_tokens=500", "model.shape={max_position_embeddings: 1024}")
    command = ("launch", SMALL, *sets(*ON_GPUS, *larger), "--dry-run", "--json", "--device-memory")
    decided = {}
    for memory in ("80GiB", "1GiB"):
        code, said, _ = abrun(*command, memory)
        assert code == 0
        decided[memory] = json.loads(said)["decided"][CHECKPOINTING]
    assert [one["value"] for one in decided.values()] == ["none", "full"]
    none, full = (one["peaks"]["baseline"] for one in decided["1GiB"]["candidates"])
    assert none == decided["80GiB"]["candidates"][0]["peaks"]["baseline"]
    assert none["length"] == full["length"] == 506 and none["peak_bytes"] > 2 * full["peak_bytes"]


@pytest.mark.slow
def test_somebody_who_interrupts_does_not_wait_for_predictions() -> None:
    command = [sys.executable, "-m", "abrun", "launch", str(SMALL), *sets(*ON_GPUS), "--dry-run"]
    launched = subprocess.Popen(
        [*command, "--device-memory", "80GiB"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert launched.stdout and "predicting" in launched.stdout.readline()
    time.sleep(2)  # its processes import
    asked_s = time.monotonic()
    launched.send_signal(signal.SIGINT)
    launched.communicate(timeout=60)
    assert launched.returncode == 130 and time.monotonic() - asked_s < 3
