"""What `auto` of a policy becomes, what is said and kept of it, what is refused."""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import make_draft
from abrun.launch.memory.profile import GIB, Point
from abrun.logs.recorded.sources import ReadingOptions
from abrun.messages.codes import Code
from abrun.recipe.experiment import (
    CHECKPOINTING,
    KEEP_GATHERED,
    MICRO_BATCH_TOKENS,
    CommandRecipe,
    Recipe,
    load_recipe,
)
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.recipe.reading import dotted
from abrun.recipe.run import ClusterConfig, OwnRunConfig
from abrun.report.comparing import compare_sources
from abrun.runs.experiment import open_experiment, planned_runs, run_dir
from abrun.runs.rundir import RunDir
from abrun.tools.predict import auto, probes
from abrun.tools.predict import peaks as predict
from abrun.tools.predict.auto import decide_values, resolve_auto
from abrun.tools.predict.facts import Answer
from abrun.tools.predict.peaks import SLEEPING_ENGINE_BYTES
from abrun.tools.predict.probes import Probe
from abrun.tools.predict.trace import find_largest_microbatch
from tests.launch.fakes import FAKE
from tests.snapshot import Snapshot
from tests.tools.predict.fake_pool import FakePool, Respond

SMALL = Path(__file__).parents[2] / "launch" / "small.yaml"
AUTO = f"{CHECKPOINTING}=auto"
ON_GPUS = [AUTO, "cluster={gpus_per_node: 1}"]
Peaks = Mapping[str, Mapping[str, float]]  # GiB by what is computed again and arm


LONGEST = 3000


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Respond], list[Probe]]:
    """Has one probe after the other answered so; returns the list of those asked, which grows."""
    # The tests do not depend on this machine's GPU and cores
    monkeypatch.setattr(predict, "_query_smallest_gpu", lambda: None)
    monkeypatch.setattr(probes, "usable_cores", lambda: 1)
    folders = iter(range(100))

    def say(respond: Respond) -> list[Probe]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache {next(folders)}"))
        asked: list[Probe] = []
        monkeypatch.setattr(auto, "ProbePool", lambda on_start: FakePool(respond, asked, on_start))
        return asked

    return say


def row_of(probe: Probe, gib: float) -> Answer:
    """What a process that predicts writes."""
    config, (length,) = probe.config, probe.job["lengths"]
    row: dict[str, Any] = {"length": length, "num_sequences": probe.job["num_sequences"]}
    row |= {"by_phase": {"forward_backward": {"activations": int(gib * GIB)}}}
    row |= {"experts": "num_experts" in config.model.architecture}
    return row | {"vllm": {"weights": 1, "cache": 1} if config.rollout.engine == "vllm" else None}


@pytest.fixture
def predicts(
    answers: Callable[[Respond], list[Probe]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Peaks], list[tuple[str, str]]]:
    """Has predictions say these peaks; returns the list of what they are asked, which grows."""

    def say(peaks: Peaks) -> list[tuple[str, str]]:
        asked: list[tuple[str, str]] = []

        def respond(probe: Probe) -> Answer:
            if probe.kind == "longest":
                return {"longest": 64, "max_positions": None}
            value = probe.config.policy.activation_checkpointing
            asked.append((value, probe.arm))
            return row_of(probe, peaks[value][probe.arm])

        answers(respond)
        return asked

    return say


def of(baseline: float, treatment: float) -> dict[str, float]:
    return {"baseline": baseline, "treatment": treatment}


def recipe(*sets: str) -> Recipe | CommandRecipe:
    return load_recipe(SMALL, [*ON_GPUS, *sets])


def again(open_recipe: Recipe | CommandRecipe, memory: str | None = None) -> dict[str, Any]:
    """Of what is computed again."""
    return decide_values(open_recipe, memory, is_local=True)[CHECKPOINTING]


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
    decision = again(recipe(*sets), memory)
    assert decision["value"] == value and [one["fits"] for one in decision["candidates"]][-1]
    tried = list(dict.fromkeys(one for one, _ in asked))
    assert tried == [
        one["values"][CHECKPOINTING] for one in decision["candidates"]
    ]  # and none after what fits
    assert tried[-1] == value and tried[0] == "none"


def test_an_arm_with_a_value_of_its_own_keeps_it_and_is_not_asked(predicts: Callable[[Peaks], Any]) -> None:
    asked = predicts({"none": {"baseline": 95}, "full": {"baseline": 60}})
    with_value = recipe(f"arms.treatment={{{CHECKPOINTING}: none}}")
    options = LaunchOptions(device_memory="80GiB")
    plan = resolve_auto(
        with_value, make_draft(with_value), options, lambda plan: [], is_local=True, dry_run=True
    )
    assert asked == [("none", "baseline"), ("full", "baseline")]
    assert plan.treatment_diff["treatment"] == {CHECKPOINTING: ("full", "none")}


@pytest.mark.parametrize(
    ("own", "value"), [("", "full"), (", policy.activation_checkpointing: full", "selective")]
)
def test_an_arm_on_cpu_cores_that_compiles_nothing_gets_a_value_that_it_can_have(
    own: str, value: str, predicts: Callable[[Peaks], Any]
) -> None:
    predicts(PEAKS)
    arm = f"arms.treatment={{cluster.gpus_per_node: 0, policy.compile: false{own}}}"
    assert again(recipe(COMPILED, arm), "105GiB")["value"] == value


def test_vllm_that_sleeps_beside_it_takes_its_part(predicts: Callable[[Peaks], Any]) -> None:
    fits = {"none": of(90 - SLEEPING_ENGINE_BYTES / 2 / GIB, 1), "full": of(1, 1)}
    predicts(fits)
    assert again(recipe(), "100GiB")["value"] == "none"
    assert again(recipe("rollout={engine: vllm}"), "100GiB")["value"] == "full"


def test_what_cannot_fit_is_refused_and_what_is_too_close_to_tell_is_said(
    predicts: Callable[[Peaks], Any], snapshot: Snapshot
) -> None:
    predicts({"none": of(200, 1), "full": of(109, 80)})
    decision = again(recipe(), "100GiB")
    assert decision["value"] == "full" and not decision["candidates"][-1]["fits"]
    snapshot(decision["why"])
    with snapshot.refused(LaunchError):
        decide_values(recipe(), "98GiB", is_local=True)


@pytest.mark.parametrize(
    ("sets", "here"), [([], True), ([], False), (["policy.backend.type=megatron"], True)]
)
def test_nothing_is_guessed(
    monkeypatch: pytest.MonkeyPatch, sets: list[str], here: bool, snapshot: Snapshot
) -> None:
    monkeypatch.setenv("PATH", "")  # without nvidia-smi
    with snapshot.refused(LaunchError):
        decide_values(recipe(*sets), None, is_local=here)


def test_on_cpu_cores_nothing_is_computed_again(predicts: Callable[[Peaks], Any]) -> None:
    asked = predicts({})
    decision = again(load_recipe(SMALL, [AUTO]))
    assert decision["value"] == "none" and "trains on GPUs" in decision["why"]
    assert not asked


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abrun: Command) -> Command:
    """A command in an empty folder, on two pretended GPUs, by the fake trainer: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FAKE[1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code, output, errors = abrun(*arguments)
        return code, " ".join(output.split()), " ".join(errors.split())

    return run


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def test_the_runs_get_what_was_decided_and_the_experiment_keeps_why(
    command: Command, predicts: Callable[[Peaks], Any], tmp_path: Path, snapshot: Snapshot
) -> None:
    predicts({"none": of(95, 50), "full": of(60, 30)})
    words = ("launch", SMALL, *sets(*ON_GPUS), "--device-memory", "80GiB", "--no-compare")
    code, said, _ = command(*words, "--seeds", "0,1")
    experiment_dir = tmp_path / "runs" / "small"
    kept = open_experiment(experiment_dir)
    decided = kept["decided"][CHECKPOINTING]
    assert decided["asked"] == "auto" and decided["value"] == "full"
    why = decided["why"]
    snapshot(why)
    assert code == 0 and said.count(f"{CHECKPOINTING}: {why}") == 1
    assert decided["device_bytes"] == 80 * GIB and decided["margin"] == 0.1
    assert decided["candidates"][1]["peaks"]["treatment"] == {
        "num_sequences": 128,
        "length": 64,
        "phase": "forward_backward",
        "peak_bytes": 30 * GIB,
        "asleep_bytes": 0,
    }
    assert kept["recipe"]["policy"]["activation_checkpointing"] == "full"
    configs = [RunDir(run_dir(experiment_dir, name)).record().config for name in planned_runs(experiment_dir)]
    assert {config["policy"]["activation_checkpointing"] for config in configs} == {"full"}
    comparison = compare_sources([str(experiment_dir)], ReadingOptions())
    assert comparison.as_json()["notes"][0] == f"{CHECKPOINTING}: {why}"

    asked = predicts({})  # resumed with a seed more, it is what it was, whatever the memory is now
    code, said, _ = command(
        *words[:-3], "--device-memory", "1GiB", "--no-compare", "--seeds", "0-2", "--resume"
    )
    assert code == 0 and not asked
    resumed = open_experiment(experiment_dir)
    assert resumed["decided"] == kept["decided"] and len(resumed["runs"]) == 6
    assert resumed["recipe"]["policy"]["activation_checkpointing"] == "full"

    code, _, said = command(*words)  # refused before anything is predicted
    assert code == 2 and "already exists here" in said and not asked


def test_what_a_launch_would_refuse_is_said_before_minutes_of_predictions(
    command: Command, predicts: Callable[[Peaks], Any], tmp_path: Path
) -> None:
    asked = predicts(PEAKS)
    three = ("cluster={gpus_per_node: 4}", "algorithm.prompts_per_step=32")
    code, _, said = command("launch", SMALL, *sets(AUTO, *three), "--device-memory", "80GiB")
    assert code == 2 and "this machine has 2 visible GPUs" in said and not asked
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_shows_what_it_would_be(command: Command, predicts: Callable[[Peaks], Any]) -> None:
    asked = predicts(PEAKS)
    words = ("launch", SMALL, *sets(*ON_GPUS), "--dry-run", "--device-memory", "120GiB")
    code, said, _ = command(*words)
    assert code == 0 and "auto resolves to none: predicted peaks 95.0 GiB (baseline)" in said
    assert len(asked) == 2  # nothing is predicted twice
    code, said, _ = command(*words, "--json")
    assert code == 0 and json.loads(said)["decided"][CHECKPOINTING]["value"] == "none"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory-profile", SMALL, *sets(AUTO)], "got 'auto'"),
        (["memory-profile", SMALL, *sets(AUTO), "--predict"], "got 'auto'"),
        (
            ["launch", SMALL, "--dry-run", "--device-memory", "h201"],
            "--device-memory: got 'h201'; allowed: a size",
        ),
        (["launch", SMALL, "--device-memory", "h200"], "--device-memory: requires --dry-run"),
        (["faults", "run", SMALL, "--device-memory", "h200"], "--device-memory: requires --dry-run, or"),
        (
            ["launch", SMALL, *sets(AUTO), "--device-memory", "lots"],
            "--device-memory: got 'lots'; allowed: a",
        ),
        (
            ["launch", SMALL, *sets(f"arms.treatment={{{CHECKPOINTING}: auto}}")],
            "got 'auto', which is decided",
        ),
    ],
)
def test_other_commands_say_what_to_write(command: Command, words: list[Any], said: str) -> None:
    code, _, error = command(*words)
    assert code == 2 and said in error


def test_no_run_is_ever_told_auto(snapshot: Snapshot) -> None:
    config = recipe().with_auto_values().run_config("baseline").model_dump()
    config["policy"]["activation_checkpointing"] = "auto"
    with pytest.raises(ValueError, match="'none', 'selective' or 'full'"):
        OwnRunConfig.model_validate(config)
    with snapshot.refused(RecipeError):
        recipe().run_config("baseline")


# --- several values at once ---

ALL = [
    AUTO,
    f"{KEEP_GATHERED}=auto",
    f"{MICRO_BATCH_TOKENS}=auto",
    "policy.packing=true",
    "algorithm.prompts_per_step=1024",
]
OF_A_RUN = (CHECKPOINTING, KEEP_GATHERED, MICRO_BATCH_TOKENS)  # decided before how many runs share a GPU
ACTIVATIONS = {"none": 8.0, "selective": 4.0, "full": 0.5}  # GiB a thousand tokens


def peak(values: Mapping[str, Any]) -> float:
    """GiB of a made-up model."""
    tokens = values[MICRO_BATCH_TOKENS]
    return 20 + 9 * values[KEEP_GATHERED] + ACTIVATIONS[values[CHECKPOINTING]] * tokens / 1000


@pytest.fixture
def made_up(answers: Callable[[Respond], list[Probe]]) -> list[dict[str, Any]]:
    """Has predictions say `peak`, and tasks `LONGEST`; returns the list of what they are asked."""
    return predict_made_up(answers)


def predict_made_up(
    answers: Callable[[Respond], list[Probe]],
    longest: int = LONGEST,
    measure: Callable[[Probe], Answer | Exception] | None = None,
) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def respond(probe: Probe) -> Answer | Exception:
        if probe.kind == "longest":
            return {"longest": longest, "max_positions": None}
        if probe.kind == "measured":
            assert measure is not None
            return measure(probe)
        given = dotted(probe.config.model_dump())
        values = {key: given[key] for key in OF_A_RUN}
        asked.extend([values] if values not in asked else [])
        return row_of(probe, peak(values))

    answers(respond)
    return asked


def preferred(*, compiled: bool) -> list[dict[str, Any]]:
    """The candidates as docs/explanation/memory-prediction.md has them."""
    found = []
    for recomputed in ("none", "selective", "full") if compiled else ("none", "full"):
        for gathered in (True, False):
            for tokens in (32768, 16384, 8192):
                found.append((recomputed, gathered, tokens))
    found += [("full", False, 4096), ("full", False, LONGEST)]
    return [dict(zip(OF_A_RUN, one, strict=True)) for one in found]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_that_fits_of_the_documented_order(made_up: list[dict[str, Any]], compiled: bool) -> None:
    chosen, candidates = set(), preferred(compiled=compiled)
    enough = {math.ceil(peak(one) / 0.9) for one in candidates}
    for memory in sorted(enough | {gib - 1 for gib in enough}):
        first = next(
            (one for one in candidates if peak(one) <= 0.9 * memory),
            dict(zip(OF_A_RUN, ("full", False, LONGEST), strict=True)),
        )
        one = decide_values(
            recipe(*ALL, f"policy.compile={str(compiled).lower()}"), f"{memory}GiB", is_local=True
        )
        assert {key: of["value"] for key, of in one.items()} == first
        assert len(one[KEEP_GATHERED]["candidates"]) <= (10 if compiled else 8)  # each takes seconds
        assert one[KEEP_GATHERED]["candidates"][-1]["values"] == first  # the chosen one is the last
        chosen.add(tuple(first.values()))
    assert len(chosen) > (11 if compiled else 8)


@pytest.mark.parametrize(
    ("sets", "longest", "memory", "tokens"),
    [
        ([], 3000, 320, 32768),
        ([], 3000, 170, 16384),
        ([], 3000, 120, 8192),
        ([], 3000, 70, 4096),
        ([], 3000, 45, 3000),
        ([], 20000, 400, 32768),
        ([], 20000, 220, 20000),  # one sequence at the least
        ([], 12, 45, 1536),  # 1024 x 8 sequences a step, of which a rank has 128 an update
        (["algorithm.minibatches_per_step=1"], 1, 400, 1024 * 8),
        (["arms.treatment={policy.micro_batch_tokens: 512}"], 3000, 170, 16384),
    ],
)
def test_a_budget_is_no_more_than_an_update_has_and_no_less_than_a_sequence(
    answers: Callable[[Respond], list[Probe]], sets: list[str], longest: int, memory: int, tokens: int
) -> None:
    predict_made_up(answers, longest)
    open_one = [f"{MICRO_BATCH_TOKENS}=auto", "policy.packing=true", "algorithm.prompts_per_step=1024"]
    open_one += ["algorithm.minibatches_per_step=64"] if longest == 12 else []
    one = decide_values(
        recipe(*open_one, "policy.activation_checkpointing=none", *sets), f"{memory}GiB", is_local=True
    )
    assert one.keys() == {MICRO_BATCH_TOKENS} and one[MICRO_BATCH_TOKENS]["value"] == tokens


def test_what_was_never_decided_is_not_resumed(command: Command, made_up: list[dict[str, Any]]) -> None:
    words = ("launch", SMALL, "--no-compare", *sets("cluster={gpus_per_node: 1}", "policy.packing=true"))
    assert command(*words)[0] == 0
    code, _, said = command(*words, *sets(f"{MICRO_BATCH_TOKENS}=auto"), "--resume")
    assert code == 2 and f"without {MICRO_BATCH_TOKENS} (got None)" in said


def test_on_cpu_cores_it_is_what_takes_the_least_time(made_up: list[dict[str, Any]]) -> None:
    one = decide_values(load_recipe(SMALL, ALL), None, is_local=True)
    assert [of["value"] for of in one.values()] == ["none", True, 32768] and not made_up
    assert one[KEEP_GATHERED]["why"].startswith("auto resolves to none, true, 32768: no arm")


def test_an_arm_of_another_backend_has_nothing_to_keep_gathered(
    made_up: list[dict[str, Any]], snapshot: Snapshot
) -> None:
    megatron = f"arms.treatment={{policy.backend: {{type: megatron}}, {CHECKPOINTING}: none}}"
    decide_values(
        recipe(f"{KEEP_GATHERED}=auto", f"{MICRO_BATCH_TOKENS}=16384", "policy.packing=true", megatron),
        "200GiB",
        is_local=True,
    )
    with snapshot.refused(LaunchError):
        decide_values(recipe(*ALL, megatron), "200GiB", is_local=True)


def test_a_kernel_that_is_not_here_is_said_before_anything_is_predicted(
    made_up: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    monkeypatch.setattr(auto, "triton_refusal", lambda **_: "no triton: pip install 'abrun[triton]'")
    with snapshot.refused(LaunchError):
        decide_values(recipe(*ALL, "arms.treatment.policy.logprobs.impl=triton"), "200GiB", is_local=True)
    assert not made_up


@pytest.mark.parametrize(
    "change",
    [
        "{policy.packing: false}",
        "{policy: {packing: false, micro_batch_size: 4}}",
        "{policy.micro_batch_size: 1}",
    ],
)
def test_a_padded_arm_says_that_it_has_no_budget(change: str, snapshot: Snapshot) -> None:
    with snapshot.refused(RecipeError):
        recipe(*TOKENS, f"arms.treatment={change}")
    padded = "{policy.packing: false, policy.micro_batch_size: 4, policy.micro_batch_tokens: null}"
    config = recipe(*TOKENS, f"arms.treatment={padded}").with_auto_values().run_config("treatment")
    assert isinstance(config, OwnRunConfig) and config.policy.micro_batch_size == 4


# --- what is measured ---


@pytest.fixture
def measures(
    answers: Callable[[Respond], list[Probe]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Any]]:
    """Pretends a GPU of 80 GiB, on which steps take GiB by their tokens, or (text) end in that phase."""
    monkeypatch.setattr(predict, "_query_smallest_gpu", lambda: 80 * GIB)

    def say(of_tokens: Mapping[int, float | str | Exception]) -> list[Any]:
        asked: list[Any] = []

        def measure(probe: Probe) -> Answer | Exception:
            tokens = probe.config.policy.micro_batch_tokens or 0
            asked.append((probe.arm, tokens, probe.job))
            found = of_tokens[tokens]
            if isinstance(found, Exception):
                return found
            phase, ran_out = ("backward", None) if not isinstance(found, str) else (found, found)
            gib = 70 if isinstance(found, str) else found
            answer = {"phase": phase, "peak_bytes": int(gib * GIB), "reserved_bytes": None}
            return answer | {"out_of_memory": ran_out}

        predict_made_up(answers, measure=measure)
        return asked

    return say


TOKENS = ["policy.packing=true", f"{MICRO_BATCH_TOKENS}=auto", "algorithm.prompts_per_step=1024"]
# Predicted: 36.4 GiB of 32,768 tokens, 28.2 of 16,384, 24.1 of 8,192 ...
FULL = [*TOKENS, f"{CHECKPOINTING}=full"]


def test_one_step_is_measured_where_the_gpu_is(
    measures: Callable[..., list[Any]], snapshot: Snapshot
) -> None:
    asked = measures({32768: 36.5})
    one = decide_values(load_recipe(SMALL, [ON_GPUS[1], *FULL]), None, is_local=True)[MICRO_BATCH_TOKENS]
    job = {"length": 32768, "num_sequences": 1, "rollouts": False, "budget_bytes": 80 * GIB}
    assert asked == [("baseline", 32768, job)]
    assert one["measured"] and one["value"] == 32768 and one["margin"] == 0.05
    assert one["candidates"][0]["measured"] == {
        "arm": "baseline",
        "phase": "backward",
        "peak_bytes": int(36.5 * GIB),
        "reserved_bytes": None,
        "out_of_memory": None,
    }
    snapshot(one["why"])


@pytest.mark.parametrize("found", ["backward", 76.1])
def test_what_is_measured_not_to_fit_gives_way_to_the_next(
    measures: Callable[..., list[Any]], found: float | str, snapshot: Snapshot
) -> None:
    asked = measures({32768: found, 16384: found, 8192: 76.0})
    one = decide_values(load_recipe(SMALL, [ON_GPUS[1], *FULL]), None, is_local=True)[MICRO_BATCH_TOKENS]
    assert [tokens for _, tokens, _ in asked] == [32768, 16384, 8192] and one["value"] == 8192
    assert [of["fits"] for of in one["candidates"]] == [False, False, True]
    snapshot(one["why"])


def test_where_all_that_is_measured_is_too_much_it_is_refused_or_said(
    measures: Callable[..., list[Any]], snapshot: Snapshot
) -> None:
    only = load_recipe(SMALL, [ON_GPUS[1], "policy.packing=true", f"{MICRO_BATCH_TOKENS}=8192", AUTO])
    measures({8192: 77.0})
    one = decide_values(only, None, is_local=True)[CHECKPOINTING]
    assert one["value"] == "full" and "nothing leaves 5 % of it free" in one["why"]
    measures({8192: "optimizer"})
    with snapshot.refused(LaunchError):
        decide_values(only, None, is_local=True)


@pytest.mark.parametrize(
    ("memory", "here", "dry_run", "why"),
    [
        (None, True, True, "run measures nothing"),
        ("80GiB", False, False, "a cluster's"),
        ("81GiB", True, False, "machine has less"),
    ],
)
def test_nothing_is_measured_elsewhere(
    measures: Callable[..., list[Any]], memory: str | None, here: bool, dry_run: bool, why: str
) -> None:
    asked = measures({})
    found = decide_values(load_recipe(SMALL, [ON_GPUS[1], *FULL]), memory, is_local=here, dry_run=dry_run)
    one = found[MICRO_BATCH_TOKENS]
    assert not asked and not one["measured"] and one["why"].endswith(why)
    assert "; predicted, not measured: " in one["why"]


def test_a_step_that_cannot_be_measured_is_an_error_with_its_reason(
    measures: Callable[..., list[Any]], snapshot: Snapshot
) -> None:
    log = Path("/tmp/abrun-memory-x/baseline/output.log")
    measures({32768: LaunchError(Code.PROBE_FAILED(probe="baseline", log=log))})
    with pytest.raises(LaunchError) as raised:
        decide_values(load_recipe(SMALL, [ON_GPUS[1], *FULL]), None, is_local=True)
    snapshot(raised.value)


# --- the step that is predicted ---


@pytest.mark.parametrize(
    ("sets", "num_sequences", "tokens"),
    [
        ([], 128, 12),  # `37+58=`, and 6 new tokens
        (["policy.micro_batch_size=4"], 4, 12),
        (["algorithm.minibatches_per_step=2"], 64, 12),
        (["policy.packing=true", "policy.micro_batch_tokens=512"], 1, 512),
        (["policy.packing=true", "policy.micro_batch_tokens=4"], 1, 12),  # one sequence, with its prompt
        (["algorithm={type: sft}"], 32, 10),  # `37+58=`, `195` and the end
        (["algorithm={type: dpo}"], 64, 10),
        (["algorithm={type: sft}", "policy={packing: true, micro_batch_tokens: 4}"], 1, 10),
        (["algorithm={type: dpo}", "policy={packing: true, micro_batch_tokens: 512}"], 2, 256),
        (["algorithm={type: dpo}", "policy={packing: true, micro_batch_tokens: 4}"], 2, 10),
    ],
)
def test_a_step_is_as_large_as_the_run_makes_it(sets: list[str], num_sequences: int, tokens: int) -> None:
    claims = "compare.claims=[{metric: train/loss, window: last 20%, margin: 0.05}]"
    config = load_recipe(SMALL, [*sets, claims]).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    assert find_largest_microbatch(config) == (num_sequences, tokens)


@pytest.mark.slow
def test_real_tasks_and_predictions_decide_all(command: Command) -> None:
    """With positions for 506 tokens: a microbatch is many sequences, of the 32 that a rank has an update."""
    larger = ("rollout.max_new_tokens=500", "model.shape={max_position_embeddings: 600}")
    values = (AUTO, f"{KEEP_GATHERED}=auto", f"{MICRO_BATCH_TOKENS}=auto", "policy.packing=true")
    both = ("cluster={gpus_per_node: 2}", "algorithm.minibatches_per_step=2")
    words = ("launch", SMALL, *sets(*values, *larger, *both), "--dry-run", "--json", "--device-memory")
    code, said, _ = command(*words, "80GiB")
    assert code == 0, said
    of = json.loads(said)["decided"]
    assert [one["value"] for one in of.values()] == ["none", True, 16192]  # 32 x 506
    (first,) = of[KEEP_GATHERED]["candidates"]
    assert (first["peaks"]["baseline"]["num_sequences"], first["peaks"]["baseline"]["length"]) == (27, 600)


@pytest.mark.slow
def test_a_real_measurement_is_that_of_the_prediction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step on CPU cores in a GPU's place, whose rank counts live tensors within a budget."""
    monkeypatch.setattr(predict, "_query_smallest_gpu", lambda: GIB)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = probes.measure_cell

    def on_cores(directory: Path, arm: str, point: Point, config: OwnRunConfig, *rest: Any) -> Any:
        return real(directory, arm, point, config.model_copy(update={"cluster": ClusterConfig()}), *rest)

    monkeypatch.setattr(probes, "measure_cell", on_cores)
    large = ("rollout.max_new_tokens=500", "model.shape={max_position_embeddings: 600, vocab_size: 8192}")
    one = decide_values(recipe(*TOKENS, *large), None, is_local=True)[MICRO_BATCH_TOKENS]
    print(one["why"])
    measured = one["candidates"][-1]["measured"]
    predicted = one["candidates"][-1]["peaks"][measured["arm"]]
    assert one["measured"] and measured["out_of_memory"] is None
    # The attention of CPU cores holds more than a GPU's
    assert predicted["peak_bytes"] < measured["peak_bytes"] < 1.25 * predicted["peak_bytes"]
    assert not list(tmp_path.glob("abrun-*"))


@pytest.mark.slow
@pytest.mark.usefixtures("heard_signals")
def test_somebody_who_interrupts_does_not_wait_for_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = [sys.executable, "-m", "abrun", "launch", str(SMALL), *sets(*ON_GPUS), "--dry-run"]
    launched = subprocess.Popen([*words, "--device-memory", "80GiB"], stdout=subprocess.PIPE, text=True)
    assert launched.stdout and "auto: deciding" in launched.stdout.readline()
    time.sleep(2)  # its processes import
    asked_s = time.monotonic()
    launched.send_signal(signal.SIGINT)
    launched.communicate(timeout=60)
    assert launched.returncode == 130 and time.monotonic() - asked_s < 3
    assert not list(tmp_path.glob("abrun-*"))
