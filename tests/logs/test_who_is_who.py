"""Arm, seed and parts of runs as other people's trainers lay them out."""

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import ComparisonError, StoreError
from abrun.logs import Log, read_logs
from abrun.logs.naming import guess_runs
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.logs.recorded.sources import ReadingOptions, open_sources
from abrun.messages.codes import Code
from abrun.runs.layout import RunName
from abrun.stats.series import build_series


def write(path: Path, seed: int = 0, shift: float = 0.0, metrics: Sequence[str] = ("reward", "loss")) -> None:
    """A log of 20 steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).normal(shift, 0.1, 20)
    rows = [{"step": step, **dict.fromkeys(metrics, value)} for step, value in enumerate(values.tolist(), 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def opened(*sources: object, **reading: object) -> RecordedExperiment:
    options = {"may_unpair": True, "may_be_one_arm": True, **reading}
    return open_sources([str(source) for source in sources], ReadingOptions(**options))  # type: ignore[arg-type]


def names(experiment: RecordedExperiment) -> dict[str, list[int]]:
    """The seeds of each arm."""
    return {arm: sorted(run.seed for run in experiment.runs if run.arm == arm) for arm in experiment.arms}


# --- processes, starts and jobs ---


@pytest.mark.parametrize(
    "layout",
    [
        "{arm}/seed_{seed}/dp_rank_{rank}.jsonl",
        "{arm}/seed-{seed}/worker{rank}/metrics.jsonl",
        "{arm}-s{seed}-rank{rank}.jsonl",
        "{arm}/s{seed}/metrics_process-{rank}.jsonl",
    ],
)
def test_processes_of_a_run_are_averaged(tmp_path: Path, layout: str) -> None:
    for arm in ("ddp", "fsdp"):
        for seed in (1, 2):
            for rank in range(4):
                write(tmp_path / layout.format(arm=arm, seed=seed, rank=rank), seed, shift=rank)
    experiment = opened(tmp_path)
    assert names(experiment) == {"ddp": [1, 2], "fsdp": [1, 2]}
    first = next(iter(experiment.runs.values())).metrics["train/reward"]
    assert abs(first.values.mean() - 1.5) < 0.1  # the mean of 0, 1, 2 and 3


@pytest.mark.parametrize(
    "processes",
    [("master-0", "worker-0", "worker-1"), ("head", "worker-1", "worker-2"), ("chief-0", "worker-0", "ps-0")],
)
def test_a_leader_is_a_process_of_the_workers_beside_it(tmp_path: Path, processes: Sequence[str]) -> None:
    for arm in ("master", "fp8"):
        for seed in (1, 2):
            for shift, process in enumerate(processes):
                write(tmp_path / f"{arm}-s{seed}-{process}.jsonl", seed, shift=shift)
    experiment = opened(tmp_path)
    assert names(experiment) == {"master": [1, 2], "fp8": [1, 2]}
    assert all(abs(run.metrics["train/loss"].values.mean() - 1) < 0.1 for run in experiment.runs.values())


def test_the_ends_of_pods_names_are_neither_arms_nor_seeds(tmp_path: Path) -> None:
    for arm, pods in (("base", ("7c9f6d-x2k4p", "7c9f6d-b8qzt")), ("fp8", ("5d8c77-lm2nq", "5d8c77-bcdfg"))):
        for number, pod in enumerate(pods):
            write(tmp_path / f"{arm}-{pod}" / "metrics.jsonl", number)
    experiment = opened(tmp_path)
    assert names(experiment) == {"base": [0, 1], "fp8": [0, 1]} and not experiment.seeds_known
    assert [name.arm for name in named([named_log("a-bs256", {}), named_log("b-bs256", {})])] == [
        "a-bs256",
        "b-bs256",
    ]


def test_numbers_of_gpus_are_arms() -> None:
    names = [f"gpu{number}-s{seed}" for number in (1, 2, 4) for seed in (0, 1)]
    guess = guess_runs([Log(name=name, place=name, metrics={}) for name in names])
    assert guess is not None and not isinstance(guess, str)
    assert [str(name) for name in guess.names[:3]] == ["gpu1/seed-0", "gpu1/seed-1", "gpu2/seed-0"]


@pytest.mark.parametrize("word", ["job_", "version_", "attempt-", "restart", "Trial_"])
def test_numbers_of_jobs_and_starts_are_no_seeds(tmp_path: Path, word: str) -> None:
    for arm in ("old", "new"):
        for number in range(3):
            write(tmp_path / arm / f"{word}{number}" / "log.jsonl", number)
    experiment = opened(tmp_path / "old", tmp_path / "new")
    assert not experiment.seeds_known
    assert not experiment.compare.paired


@pytest.mark.parametrize("layout", ["{arm}/{number}/log", "{arm}/4821_{number}", "{arm}-{job}_{number}"])
def test_numbers_that_may_index_an_array_of_jobs_pair_no_runs(tmp_path: Path, layout: str) -> None:
    for arm, job in (("old", 48210), ("new", 48211)):
        for number in range(3):
            path = tmp_path / "runs" / f"{layout.format(arm=arm, job=job, number=number)}.jsonl"
            write(path, number)
    experiment = opened(tmp_path / "runs")
    assert names(experiment) == {"old": [0, 1, 2], "new": [0, 1, 2]}
    assert not experiment.seeds_known and not experiment.compare.paired
    assert Code.NOTHING_SAYS_SEEDS() in experiment.guessed
    if layout.endswith("log"):
        with pytest.raises(ComparisonError, match=r"may only count jobs; .* for example: .*--pattern"):
            opened(tmp_path / "runs", may_unpair=False)
        assert opened(tmp_path / "runs", pattern="{arm}/{seed}").compare.paired


@pytest.mark.parametrize("name", ["latest/log", "best/log", "current"])
def test_a_copy_of_a_numbered_run_beside_it_is_left_out(tmp_path: Path, name: str) -> None:
    for seed in (0, 1):
        for arm in ("old", "new"):
            write(tmp_path / arm / f"{name.replace(name.partition('/')[0], f'seed{seed}')}.jsonl", seed)
        write(tmp_path / "old" / f"{name}.jsonl", 1)
    experiment = opened(tmp_path)
    assert names(experiment) == {"new": [0, 1], "old": [0, 1]}
    guesses = [str(reason.values.get("guess")) for reason in experiment.guessed]
    assert sum("copy of old/seed1" in guess for guess in guesses) == 1
    write(tmp_path / "old" / f"{name}.jsonl", 7)  # no copy
    assert len(opened(tmp_path).runs) == 5


def test_an_arm_of_that_name_is_no_copy(tmp_path: Path) -> None:
    write(tmp_path / "shallow" / "a.jsonl")
    write(tmp_path / "shallow" / "a" / "latest.jsonl")
    assert len(read_logs(str(tmp_path / "shallow"))) == 2
    tmp_path = tmp_path / "arms"
    for arm in ("current", "new"):
        for seed in (0, 1):
            write(tmp_path / arm / f"seed{seed}.jsonl", seed)
    assert names(opened(tmp_path)) == {"current": [0, 1], "new": [0, 1]}


# --- checkpoints ---


@pytest.mark.parametrize("folder", ["checkpoint-{}", "epoch_{}", "global_step_{}", "iter_{:07d}"])
def test_scores_of_checkpoints_are_one_run_by_step(tmp_path: Path, folder: str) -> None:
    for arm, shift in (("base", 0.0), ("new", 0.1)):
        for step in (100, 200, 300):
            results = {"results": {"gsm8k": {"acc,none": step / 1000 + shift}}}
            path = tmp_path / arm / folder.format(step) / "results_2026-09-01T10-00-00.123.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(results))
    experiment = opened(tmp_path)
    assert names(experiment) == {"base": [0], "new": [0]}
    curves = [run.metrics["gsm8k/acc"] for run in experiment.runs.values()]
    assert [curve.steps.tolist() for curve in curves] == [[100, 200, 300]] * 2
    assert np.allclose(curves[1].values - curves[0].values, 0.1)


@pytest.mark.parametrize(
    "layout", ["{arm}/seed{seed}/{word}.csv", "{arm}_s{seed}-{word}_model.csv", "{arm}.csv"]
)
def test_best_and_last_are_evaluations_of_one_run(tmp_path: Path, layout: str) -> None:
    for arm in ("old", "new"):
        scores = {(seed, word): seed + 0.1 * (word == "best") for seed in (1, 2) for word in ("best", "last")}
        for (seed, word), score in scores.items():
            path = tmp_path / layout.format(arm=arm, seed=seed, word=word)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"task,score\ngsm8k,{score}\n")
            if layout == "{arm}.csv":
                rows = [f"{seed},{word},{score}\n" for (seed, word), score in scores.items()]
                path.write_text("seed,checkpoint,gsm8k\n" + "".join(rows))
    experiment = opened(tmp_path)
    assert names(experiment) == {"old": [1, 2], "new": [1, 2]}
    found = {
        name.rpartition("/gsm8k")[0] or name: s
        for name, s in next(iter(experiment.runs.values())).metrics.items()
    }
    assert {name: series.values.tolist() for name, series in found.items()} == {"best": [1.1], "last": [1.0]}


def test_results_beside_checkpoints_and_models_of_transformers_are_read(tmp_path: Path) -> None:
    for arm, shift in (("old", 0.0), ("new", 0.1)):
        for step in (100, 200):
            folder = tmp_path / "checkpoints" / arm / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            (folder / "eval_results.json").write_text(json.dumps({"eval_loss": 1 - step / 1000 + shift}))
        for folder in (tmp_path / "checkpoints" / arm, tmp_path / "models" / arm / "seed1"):
            folder.mkdir(parents=True, exist_ok=True)
            results = {"epoch": 2.0, "eval_loss": 0.5 + shift, "train_loss": 0.25}
            (folder / "all_results.json").write_text(json.dumps(results))
            (folder / "eval_results.json").write_text('{"eval_loss": 9.0}')
            (folder / "test_results.json").write_text(
                '{"problem": [' + "1," * (1 << 20) + "1]}"
            )  # no metrics
    curves = opened(tmp_path / "checkpoints")
    assert names(curves) == {"new": [0], "old": [0]}
    losses = [run.metrics["validation/loss"] for name, run in curves.runs.items() if name.arm == "old"]
    assert [(loss.steps.tolist(), loss.values.tolist()) for loss in losses] == [([100, 200], [0.9, 0.8])]
    finals = opened(tmp_path / "models")
    assert names(finals) == {"new": [1], "old": [1]} and finals.axis == "final"
    metrics = next(run.metrics for name, run in finals.runs.items() if name.arm == "old")
    assert {name: series.values.tolist() for name, series in metrics.items()} == {
        "train/epoch": [2.0],
        "eval/loss": [0.5],
        "train/loss": [0.25],
    }


def test_monitors_of_parallel_environments_are_one_run_of_episodes(tmp_path: Path) -> None:
    for arm in ("old", "new"):
        for seed in (1, 2):
            folder = tmp_path / arm / f"seed{seed}"
            folder.mkdir(parents=True)
            for worker in (0, 1):
                episodes = "".join(f"{10 * worker + n},{n + 5},{n + worker / 2}\n" for n in range(3))
                head = f'#{{"t_start": {100 + seed}, "env_id": "CartPole-v1"}}\nr,l,t\n'
                (folder / f"{worker}.monitor.csv").write_text(head + episodes)
    experiment = opened(tmp_path)
    assert names(experiment) == {"new": [1, 2], "old": [1, 2]}
    run = next(iter(experiment.runs.values()))
    assert run.metrics["train/reward"].steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.metrics["train/reward"].values.tolist() == [0, 10, 1, 11, 2, 12]
    assert "episodes of 2 workers" in str([reason.values.get("guess") for reason in experiment.guessed])


def test_a_monitor_without_its_header_is_refused(tmp_path: Path) -> None:
    for seed in (1, 2):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        header = "r,l,t\n" * (seed == 1)
        (folder / "0.monitor.csv").write_text(f'#{{"t_start": 1}}\n{header}25.1,20,0.5\n26,21,1.5\n')
    with pytest.raises(StoreError, match=r"seed2.*no column l, r, t of episodes; restore its header"):
        opened(tmp_path)


def test_one_numbered_checkpoint_beside_best_and_last_is_of_their_run(tmp_path: Path) -> None:
    for number, run in enumerate(f"{arm}_seed{seed}" for arm in ("old", "new") for seed in (1, 2)):
        for checkpoint in ("best", "last", "500"):
            path = tmp_path / run / f"checkpoint-{checkpoint}" / "eval_results.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps({"epoch": 2.0, "eval_loss": number / 7 + len(checkpoint)}))
    experiment = opened(tmp_path)
    assert names(experiment) == {"new": [1, 2], "old": [1, 2]}
    metrics = next(iter(experiment.runs.values())).metrics
    assert {"500/eval/loss", "best/eval/loss", "last/eval/loss"} <= {*metrics}


def test_epochs_whose_steps_begin_again_are_asked_about(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        write(tmp_path / f"epoch_{epoch}.jsonl", epoch)
    with pytest.raises(ComparisonError, match="differ in the number of a process or checkpoint"):
        opened(tmp_path)
    assert names(opened(tmp_path, unpaired=True)) == {tmp_path.name: [0, 1, 2]}


# Names with the place of arm and seed or process -> the seeds of each arm, and the number of runs in an arm
PUBLIC_LAYOUTS = {
    "slime": ("{arm}-20260901_12000{n}-RANK_{n}", [0]),
    "submitit": ("{arm}/4821_{n}_log", [4821]),
    "Hydra": ("multirun/2026-09-01/12-00-00/{job}_loss={arm},seed={n}/log", [0, 1, 2]),
    "Lightning": ("{arm}/lightning_logs/version_{n}/log", [0, 1, 2]),
    "Katib": ("{arm}-{pod}2kx9rjz{n}/log", [0, 1, 2]),
    "CleanRL": ("env-v1__{arm}__{n}__169300000{job}/log", [0, 1, 2]),
}


@pytest.mark.parametrize("layout", PUBLIC_LAYOUTS)
def test_runs_of_public_layouts_have_their_arms_and_seeds(tmp_path: Path, layout: str) -> None:
    pattern, seeds = PUBLIC_LAYOUTS[layout]
    for place, arm in enumerate(("old", "new")):
        for n in range(3):
            pod = f"{'bcd'[n]}{'xz'[place]}kq2wr{'vw'[place]}"
            name = pattern.format(arm=arm, n=n, job=3 * place + n, pod="").replace(f"2kx9rjz{n}", pod)
            write(tmp_path / f"{name}.jsonl", n)
    experiment = opened(tmp_path)
    assert sorted(arm.rpartition("=")[2].rpartition("__")[2] for arm in experiment.arms) == ["new", "old"]
    assert [*names(experiment).values()] == [seeds] * 2


def test_a_resumed_run_and_files_named_by_their_only_step_are_parts_of_it(tmp_path: Path) -> None:
    for arm in ("old", "new"):
        for name, steps in (
            ("train", range(1, 21)),
            ("train-resume", range(21, 41)),
            ("validation/30", [30]),
        ):
            rows = [{"step": step, "score" if name[0] == "v" else "loss": 1 / step} for step in steps]
            path = tmp_path / arm / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / arm / "validation" / "40.jsonl").write_text('{"step": 40, "score": 2.5}\n')
    experiment = opened(tmp_path)
    assert names(experiment) == {"new": [0], "old": [0]}
    for run in experiment.runs.values():
        assert len(run.metrics["train/loss"]) == 40 and run.metrics["train/reward"].steps.tolist() == [30, 40]


# --- settings ---


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("hparams.yaml", "lr: 0.001\nseed: {seed}\n"),
        ("config.json", '{{"args": {{"seed": {seed}}}}}'),
        (".hydra/config.yaml", "algorithm:\n  seed: {seed}\n"),
        ("params.json", '{{"seed": {seed}, "env": "x"}}'),
    ],
)
def test_a_seed_in_a_file_beside_the_log_beats_a_number(tmp_path: Path, name: str, content: str) -> None:
    for arm, seeds in (("old", (3, 1, 2)), ("new", (1, 2, 3))):
        for number, seed in enumerate(seeds):
            folder = tmp_path / arm / str(number)
            write(folder / "metrics.jsonl", seed)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content.format(seed=seed))
    experiment = opened(tmp_path / "old", tmp_path / "new")
    assert names(experiment) == {"old": [1, 2, 3], "new": [1, 2, 3]}
    assert len(experiment.pairs("new")) == 3
    for seed in (1, 2, 3):
        old, new = (run for name, run in experiment.runs.items() if name.seed == seed)
        assert np.array_equal(old.metrics["train/loss"].values, new.metrics["train/loss"].values)


def test_jobs_of_hydra_have_the_arms_and_seeds_of_their_settings(tmp_path: Path) -> None:
    jobs = [("grpo", 7), ("grpo", 8), ("gspo", 8), ("gspo", 7)]
    for number, (loss, seed) in enumerate(jobs):
        folder = tmp_path / "multirun" / "2026-09-01" / "12-00-00" / str(number)
        write(folder / "metrics.jsonl")
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "config.yaml").write_text(
            f"seed: {seed}\nloss:\n  kind: {loss}\nrun: run{number}\n"
        )
    assert names(opened(tmp_path)) == {"loss.kind=grpo": [7, 8], "loss.kind=gspo": [7, 8]}


def test_settings_of_a_folder_of_several_runs_or_of_a_model_are_none(tmp_path: Path) -> None:
    for seed in (1, 2):
        write(tmp_path / f"a-s{seed}" / "log.jsonl")
    (tmp_path / "config.json").write_text('{"seed": 42}')
    (tmp_path / "a-s1" / "config.json").write_text('{"model_type": "qwen2", "seed": 1}')
    assert [log.config for log in read_logs(str(tmp_path))] == [None, None]


def test_arguments_of_transformers_are_read_from_its_event_file(tmp_path: Path) -> None:
    writer = EventFileWriter(str(tmp_path))
    text = make_tensor_proto(
        np.array([b'{"seed": 4, "learning_rate": 0.003, "optim_args": null}'], dtype=object)
    )
    writer.add_event(Event(summary=Summary(value=[Summary.Value(tag="args/text_summary", tensor=text)])))
    writer.add_event(
        Event(step=1, summary=Summary(value=[Summary.Value(tag="train/loss", simple_value=1.0)]))
    )
    writer.close()
    (log,) = read_logs(str(tmp_path))
    assert log.config == {"seed": 4, "learning_rate": 0.003, "optim_args": None}


def named_log(name: str, config: Mapping[str, object], **fields: object) -> Log:
    metrics = {"train/reward": build_series([1, 2], [0.0, 1.0])[0]}
    return Log(name=name, place=name, metrics=metrics, config=config, **fields)  # type: ignore[arg-type]


def named(logs: Sequence[Log]) -> list[RunName]:
    guess = guess_runs(logs)
    assert guess is not None and not isinstance(guess, str)
    return guess.names


def test_trials_of_ray_tune_are_called_by_the_settings_in_their_names() -> None:
    trial = "trainable_abc12_0000{0}_{0}_lr={1},batch={2}_2026-09-01_10-00-0{0}/progress"
    logs = [named_log(trial.format(number, lr, 32), {}) for number, lr in enumerate(("0.1", "1e-4", "1e-05"))]
    arms = ["trainable-lr=0.1,batch=32", "trainable-lr=1e-4,batch=32", "trainable-lr=1e-05,batch=32"]
    assert [name.arm for name in named(logs)] == arms
    logs = [
        named_log(trial.format(number, lr, 32), {"lr": lr, "seed": seed})
        for number, (lr, seed) in enumerate([(0.1, 4), (0.2, 4), (0.1, 3), (0.2, 3)])
    ]
    assert [name.seed for name in named(logs)] == [4, 4, 3, 3]


def test_runs_of_the_same_names_are_told_apart_by_their_settings() -> None:
    logs = [
        named_log(f"seed{seed}", {"seed": seed, "lr": lr, "run_name": f"seed{seed}", "dir": f"{lr}-{seed}"})
        for lr in (0.1, 0.2)
        for seed in (0, 1, 2)
    ]
    guess = guess_runs(logs)
    assert guess is not None and not isinstance(guess, str)
    assert {name.arm for name in guess.names} == {"lr=0.1", "lr=0.2"}


def test_groups_of_wandb_are_arms_before_the_words_of_names() -> None:
    people = {"grpo": "alice", "gspo": "bob"}
    logs = [
        named_log(f"{people[group]}-{word}-{seed}", {"seed": seed}, group=group)
        for group in people
        for seed, word in enumerate(("sun", "sea"))
    ]
    guess = guess_runs(logs)
    assert guess is not None and not isinstance(guess, str)
    assert {name.arm for name in guess.names} == {"grpo", "gspo"}


def test_options_name_the_settings_of_arms_and_seeds(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / "runs" / "abcd"[number]
        write(folder / "log.jsonl")
        settings = {"optim": {"lr": [0.1, 0.2][number % 2]}, "rng": number // 2, "note": number}
        (folder / "config.json").write_text(json.dumps(settings))
    experiment = opened(tmp_path / "runs", arms_by="lr", seeds_by="rng")
    assert names(experiment) == {"lr=0.1": [0, 1], "lr=0.2": [0, 1]}
    with pytest.raises(ComparisonError, match=r"they differ in 'optim\.lr', 'rng', 'note'"):
        opened(tmp_path / "runs", arms_by="learning_rate")
    with pytest.raises(ComparisonError, match=r"got 0\.1 as lr; allowed: whole numbers"):
        opened(tmp_path / "runs", seeds_by="lr")


# --- parts of a run ---


def test_processes_that_log_other_metrics_are_one_run(tmp_path: Path) -> None:
    for arm in ("sync", "async"):
        for seed in (1, 2):
            write(
                tmp_path / arm / f"seed{seed}" / "explorer" / "log.jsonl",
                metrics=("rollout/reward", "r", "q", "length"),
            )
            write(
                tmp_path / arm / f"seed{seed}" / "trainer" / "log.jsonl",
                metrics=("actor/loss", "k", "e", "length"),
            )
    logs = read_logs(str(tmp_path))
    assert [log.name for log in logs] == [
        f"{arm}/seed{seed}/log" for arm in ("async", "sync") for seed in (1, 2)
    ]
    assert sorted(logs[0].metrics) == [
        "actor/loss",
        "e",
        "explorer/length",
        "k",
        "length",
        "q",
        "r",
        "rollout/reward",
    ]
    assert names(opened(tmp_path)) == {"async": [1, 2], "sync": [1, 2]}


def test_options_name_the_parts_of_a_run(tmp_path: Path) -> None:
    for arm in ("main", "pr"):
        for seed in (1, 2):
            write(tmp_path / f"{arm}-s{seed}-orchestrator.jsonl", seed, metrics=("reward",))
            write(tmp_path / f"{arm}-s{seed}-trainer.jsonl", seed, metrics=("kl", "entropy"))
    assert names(opened(tmp_path)) == {"main": [1, 2], "pr": [1, 2]}
    for reading in ({"pattern": "{arm}-s{seed}-*or"}, {}):
        experiment = opened(tmp_path, exclude=("*-trainer.jsonl",), **reading)
        assert {len(run.metrics) for run in experiment.runs.values()} == {1}
        assert all(sorted(seeds) == [1, 2] for seeds in names(experiment).values())


def test_arms_named_by_a_component_share_their_metrics_and_stay_apart(tmp_path: Path) -> None:
    for arm in ("fp8-trainer", "fp8-rollout"):
        for seed in (1, 2):
            write(tmp_path / f"{arm}-s{seed}.jsonl", seed)
    assert names(opened(tmp_path)) == {"fp8-rollout": [1, 2], "fp8-trainer": [1, 2]}


def test_files_with_a_metric_each_are_one_run(tmp_path: Path) -> None:
    for arm in ("zero2", "zero3"):
        for seed in (1, 2):
            for metric in ("lr", "train_loss"):
                write(tmp_path / f"{arm}-seed{seed}" / f"Train_Samples_{metric}.jsonl", metrics=[metric])
    assert names(opened(tmp_path)) == {"zero2": [1, 2], "zero3": [1, 2]}
    assert [sorted(log.metrics) for log in read_logs(str(tmp_path / "zero2-seed1"))] == [["lr", "train_loss"]]


# --- names ---


def test_arms_are_called_as_they_are_written(tmp_path: Path) -> None:
    for arm in ("no_correction", "importance_sampling", "vllm-0.8.1"):
        for seed in (0, 1):
            write(tmp_path / f"{arm}_{seed}.jsonl", seed)
    assert set(opened(tmp_path).arms) == {"no_correction", "importance_sampling", "vllm-0.8.1"}


def test_words_of_starts_without_a_number_stay_in_the_names_of_arms() -> None:
    logs = [named_log(name, {}) for name in ("math-task_try1", "math-task_try2", "code-task_try1")]
    assert [name.arm for name in named(logs)] == ["math-task", "math-task", "code-task"]


def test_runs_named_by_their_start_have_the_arm_of_their_folder(tmp_path: Path) -> None:
    for version in ("0.8.1", "0.8.3", "0.10.0"):
        for hour in ("09", "10"):
            write(tmp_path / f"vllm-{version}" / f"ppo_0818T{hour}:12" / "log.jsonl", int(hour))
    experiment = opened(tmp_path, baseline="vllm-0.8.1")
    assert names(experiment) == {"vllm-0.8.1": [0, 1], "vllm-0.8.3": [0, 1], "vllm-0.10.0": [0, 1]}
    assert not experiment.seeds_known


def test_runs_named_by_a_uuid_alone_are_one_arm(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "candidate" / f"{uuid.UUID(int=number * 10**30, version=4)}.jsonl", number)
    experiment = opened(tmp_path / "candidate")
    assert names(experiment) == {"candidate": [0, 1, 2]}
    assert not experiment.seeds_known


def test_names_that_differ_in_several_numbers_are_asked_about() -> None:
    logs = [named_log(f"a-x{first}-y{second}", {}) for first in (1, 2) for second in (1, 2)]
    question = guess_runs(logs)
    assert isinstance(question, str) and "--pattern" in question


# --- rows of one step ---


def table(folder: Path, column: str, values: Sequence[object], shifts: Sequence[float]) -> None:
    for arm in ("sync", "async"):
        for seed in (1, 2):
            noise = np.random.default_rng(seed).normal(0, 0.01, 20)
            rows = [
                {"step": step, column: value, "reward": noise[step] + (shift if arm == "async" else 0.0)}
                for step in range(20)
                for value, shift in zip(values, shifts, strict=True)
            ]
            path = folder / arm / f"seed{seed}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("column", "values"),
    [("rank", range(4)), ("dp_rank", range(4)), ("host", "abcd"), ("info/worker_id", (3, 7, 8, 9))],
)
def test_rows_of_several_processes_are_averaged(
    tmp_path: Path, column: str, values: Sequence[object]
) -> None:
    table(tmp_path, column, list(values), [-0.1, -0.1, -0.1, 0.0])
    experiment = opened(tmp_path / "sync", tmp_path / "async")
    means = {run.arm: log.metrics["train/reward"].values.mean() for run, log in experiment.runs.items()}
    assert means["async"] - means["sync"] == pytest.approx(-0.075)
    assert [sorted(log.metrics) for log in experiment.runs.values()] == [["train/reward"]] * 4


@pytest.mark.parametrize("values", [(0, 1, 2), (0.5, 0.7, 1.0), ("3fa9", "77b0", "c0de")])
def test_rows_that_differ_in_another_column_are_refused_by_its_name(
    tmp_path: Path, values: Sequence[object]
) -> None:
    table(tmp_path, "task_no", values, [0.0, 0.1, 0.2])
    with pytest.raises(
        StoreError, match=r"rows of one step differ in column 'task_no'.*; write one row a step"
    ):
        opened(tmp_path / "sync", tmp_path / "async")


def test_of_the_starts_of_a_run_the_last_counts(tmp_path: Path) -> None:
    rows = [{"step": step, "attempt": start, "loss": start + 0.5} for start in (0, 1) for step in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (log,) = read_logs(str(tmp_path))
    assert log.metrics["loss"].values.tolist() == [1.5] * 3


def test_the_list_says_what_states_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for number in range(4):
        folder = tmp_path / "abcd"[number]
        write(folder / "log.jsonl")
        (folder / "config.json").write_text(json.dumps({"lr": [0.1, 0.2][number % 2], "rng": number // 2}))
    options = ["--arms-by", "lr", "--seeds-by", "rng"]
    result = CliRunner().invoke(app, ["compare", str(tmp_path), "--list", *options])
    assert result.stdout.count("(rng in the settings)") == 4


def test_rows_that_were_written_again_are_no_parts(tmp_path: Path) -> None:
    rows = [
        {"step": step, "epoch": step // 5, "tokens": 100 * step, "loss": 1 / step}
        for step in (1, 2, 3, 2, 3, 4)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (log,) = read_logs(str(tmp_path))
    assert log.metrics["loss"].steps.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "layout",
    [
        "{arm}/rank{rank}.jsonl",  # with a gap
        "{arm}/node{node}_gpu{local}.jsonl",
        "{arm}/metrics-{rank:05d}-of-00006.jsonl",
        "{arm}/attempt_0/{rank}/log.jsonl",
        "{arm}/actor_{rank}.jsonl",
    ],
)
def test_shards_of_one_training_are_one_run(tmp_path: Path, layout: str) -> None:
    for arm in ("old", "new"):
        write(tmp_path / arm / "learner.jsonl", metrics=("kl",)) if "actor" in layout else None
        for rank in (0, 1, 4, 5):
            write(tmp_path / layout.format(arm=arm, rank=rank, node=rank // 4, local=rank % 2), rank)
    assert names(opened(tmp_path)) == {"new": [0], "old": [0]}
    assert names(opened(tmp_path / "old", tmp_path / "new")) == {"old": [0], "new": [0]}


@pytest.mark.parametrize("word", ["worker{}", "events.pid400{}"])
def test_processes_that_cannot_be_joined_are_no_runs_of_their_own(tmp_path: Path, word: str) -> None:
    for arm in ("old", "new"):
        for number in (1, 2, 3):
            write(tmp_path / arm / f"{word.format(number)}.jsonl", number)
    with pytest.raises(ComparisonError, match="differ in the number of a process"):
        opened(tmp_path / "old", tmp_path / "new")


def test_tasks_that_each_source_holds_are_no_runs_of_one_arm(tmp_path: Path) -> None:
    for arm in ("old", "new"):
        for task in ("math", "code"):
            write(tmp_path / arm / f"{task}.jsonl")
    with pytest.raises(ComparisonError, match="tasks or parts of one training"):
        opened(tmp_path / "old", tmp_path / "new")


def test_checkpoints_with_a_row_each_are_one_run(tmp_path: Path) -> None:
    for arm in ("old", "new"):
        for step in (100, 200, 300):
            path = tmp_path / arm / f"checkpoint-{step}" / "metrics.jsonl"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps({"step": step, "accuracy": step / 1000}) + "\n")
    assert names(opened(tmp_path)) == {"new": [0], "old": [0]}


def test_learning_rates_are_arms_as_they_are_written(tmp_path: Path) -> None:
    for rate in ("1e-3", "1e-4", "3e-4"):
        write(tmp_path / f"lr{rate}.jsonl")
    assert set(opened(tmp_path).arms) == {"lr1e-3", "lr1e-4", "lr3e-4"}


def test_dates_that_tell_runs_of_a_seed_apart_are_asked_about(tmp_path: Path) -> None:
    for date in ("2026-05-01", "2026-05-08"):
        for number in (1, 2):
            write(tmp_path / "seeds" / f"nightly-{date}" / f"seed{number}.jsonl")
            write(tmp_path / "runs" / f"nightly-{date}-run{number}.jsonl")
    for folder in ("seeds", "runs"):
        with pytest.raises(ComparisonError, match="--pattern"):
            opened(tmp_path / folder)


@pytest.mark.parametrize("values", [("adam", "muon", "adam", "muon"), (0.1, 0.2, 0.3, 0.4)])
def test_settings_that_differ_between_numbered_runs_are_asked_about(
    tmp_path: Path, values: Sequence[object]
) -> None:
    for number, value in enumerate(values):
        write(tmp_path / f"run_{number}" / "log.jsonl", number)
        (tmp_path / f"run_{number}" / "config.json").write_text(json.dumps({"x": value, "name": number}))
    with pytest.raises(ComparisonError, match="--arms-by x"):
        opened(tmp_path)


def test_rest_of_a_name_keeps_its_separators(tmp_path: Path) -> None:
    for arm in ("ppo", "ppo_rnd"):
        for seed in (1, 2):
            write(tmp_path / "a" / f"Env-v1__{arm}__{seed}__{1700000000 + seed}.jsonl")
            write(tmp_path / "b" / "c" / f"seed={seed},x={arm}.jsonl")
    assert set(opened(tmp_path / "a").arms) == {"Env-v1__ppo", "Env-v1__ppo_rnd"}
    assert set(opened(tmp_path / "b").arms) == {"c/x=ppo", "c/x=ppo_rnd"}


# --- the list ---


def test_the_list_says_who_is_who_and_judges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for arm in ("old", "new"):
        for seed in (1, 2):
            write(tmp_path / arm / f"seed{seed}.jsonl", seed)
    result = CliRunner().invoke(app, ["compare", f"{tmp_path}/old", f"{tmp_path}/new", "--list"])
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["arm", "seed", "steps", "metrics", "log"]
    assert lines[1][:6] == ["old", "1", "(its", "name)", "1-20", "2"]
    assert "MATCH" not in result.stdout


def test_the_list_shows_the_runs_that_no_rule_can_name(tmp_path: Path) -> None:
    for name in ("sun", "sea", "sky"):
        write(tmp_path / "runs" / f"{name}-1-2.jsonl")
    write(tmp_path / "runs" / "sky-3-4.jsonl")
    result = CliRunner().invoke(app, ["compare", f"{tmp_path}/runs", "--list"])
    assert result.exit_code == 2 or "Error" in type(result.exception).__name__
    assert "sky-3-4.jsonl" in result.stdout
