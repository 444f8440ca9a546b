"""Broken runs, and comparisons that would not mean anything."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.golden.case import add_case, case, compare_in_short
from tests.verdict.simulate import edit, edit_rows, fail, write, write_experiment, write_rows

Commands = Iterator[Sequence[str]]
Break = Callable[[Path], object]


def _rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _damage(experiment_dir: Path) -> None:
    path = experiment_dir / "treatment/seed-1/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], '{"step": 5, "tr\n', *lines[5:]]))


def _exchange_configs(experiment_dir: Path) -> None:
    first, second = (experiment_dir / f"{arm}/seed-2/config.json" for arm in ("baseline", "treatment"))
    texts = first.read_text(), second.read_text()
    first.write_text(texts[1])
    second.write_text(texts[0])


def _change_config(experiment_dir: Path) -> None:
    for seed in (0, 1):
        path = experiment_dir / f"treatment/seed-{seed}/config.json"
        edit(path, lambda content: content["config"]["policy"]["optimizer"].update(schedule="cosine"))


def _change_versions(experiment_dir: Path, arms: str = "treatment", seeds: str = "*") -> None:
    for path in experiment_dir.glob(f"{arms}/seed-{seeds}/environment.json"):
        edit(path, lambda content: content["versions"].update(torch="2.12.0"))


def _change_prompts(experiment_dir: Path) -> None:
    edit(
        experiment_dir / "treatment/seed-3/environment.json",
        lambda content: content.update(prompts_sha256="f" * 64),
    )


def _change_initial_weights(experiment_dir: Path) -> None:
    path = experiment_dir / "treatment/seed-3/environment.json"
    edit(path, lambda content: content.update(initial_weights_hash="f" * 16))


def _start_from_checkpoints(experiment_dir: Path) -> None:
    origin = {"run": "baseline/seed-0 x", "step": 10, "sha256": "a" * 64}
    for path in sorted(experiment_dir.glob("*/*/metrics.jsonl")):
        edit(path.parent / "environment.json", lambda content: content.update(started_from=origin))
        write_rows(path.parent, [row for row in _rows(path.parent) if row["step"] > 10])
    edit(experiment_dir / "treatment/seed-1/environment.json", lambda content: content.pop("started_from"))


def _end(experiment_dir: Path, status: str) -> None:
    run = experiment_dir / "baseline/seed-0"
    (run / "result.json").unlink()
    edit(run / "attempts/0001.json", lambda content: content.update(status=status))


def _text_values(experiment_dir: Path) -> None:
    edit_rows(experiment_dir / "baseline/seed-0", lambda row: row.update({"train/entropy": "high"}))


def _copy_run(experiment_dir: Path) -> None:
    shutil.copy(
        experiment_dir / "baseline/seed-1/metrics.jsonl", experiment_dir / "baseline/seed-2/metrics.jsonl"
    )


def _move_steps(experiment_dir: Path) -> None:
    for run in experiment_dir.glob("treatment/seed-*"):
        edit_rows(run, lambda row: row.update(step=row["step"] + 1000))


def _every_other_step(experiment_dir: Path) -> None:
    for run in experiment_dir.glob("treatment/seed-*"):
        write_rows(run, [row for row in _rows(run) if row["step"] % 4 == 0])


def _drop_metric(experiment_dir: Path) -> None:
    for run in experiment_dir.glob("treatment/seed-*"):
        edit_rows(run, lambda row: row.pop("train/reward"))


def _nan_claimed(experiment_dir: Path) -> None:
    run = experiment_dir / "baseline/seed-2"
    edit_rows(run, lambda row: row.update({"train/reward": "NaN"}) if row["step"] > 36 else None)


def _environment_of_another_shape(experiment_dir: Path) -> None:
    write(experiment_dir / "treatment/seed-1/environment.json", {"versions": ["torch"], "devices": 3})


BREAKS: dict[str, Break] = {
    "missing-run": lambda experiment_dir: shutil.rmtree(experiment_dir / "baseline/seed-0"),
    "failed-baseline": lambda experiment_dir: fail(experiment_dir / "baseline/seed-1", after_steps=12),
    "failed-pair": lambda experiment_dir: [
        fail(experiment_dir / f"{arm}/seed-1", after_steps=12) for arm in ("baseline", "treatment")
    ],
    "running": lambda experiment_dir: _end(experiment_dir, "running"),
    "preempted": lambda experiment_dir: _end(experiment_dir, "preempted"),
    "pending": lambda experiment_dir: _end(experiment_dir, "pending"),
    "damaged-metrics": _damage,
    "no-metrics": lambda experiment_dir: (experiment_dir / "treatment/seed-1/metrics.jsonl").unlink(),
    "text-values": _text_values,
    "copied-run": _copy_run,
    "exchanged-configs": _exchange_configs,
    "undeclared-config": _change_config,
    "versions-by-arm": _change_versions,
    "versions-within-an-arm": lambda experiment_dir: _change_versions(experiment_dir, seeds="[01]"),
    "other-prompts": _change_prompts,
    "other-initial-weights": _change_initial_weights,
    "other-checkpoints": _start_from_checkpoints,
    "no-shared-step": _move_steps,
    "other-step-grid": _every_other_step,
    "metric-of-one-arm": _drop_metric,
    "nan-in-claimed-window": _nan_claimed,
    "environment-of-another-shape": _environment_of_another_shape,
}


def _broken(break_it: Break) -> Callable[[Path], Commands]:
    def build(folder: Path) -> Commands:
        break_it(write_experiment(folder / "runs/simulated", seeds=[0, 1, 2, 3], controls={"aa_reruns": 1}))
        yield compare_in_short("simulated")

    return build


for _name, _break in BREAKS.items():
    add_case(f"broken-{_name}", _broken(_break))


@case
def refusals_of_compare(folder: Path) -> Commands:
    """Everything that `abrun compare` answers with exit code 2."""
    experiment_dir = write_experiment(folder / "runs/simulated", seeds=[0, 1, 2], controls={})
    write_experiment(
        folder / "runs/alone", arms={"baseline": {}}, compare={"reference": "none.json"}, controls={}
    )
    yield ["compare", "nowhere"]
    yield ["compare", "simulated", "--claim", "train/rewrad:last 20%:0.02"]
    yield ["compare", "simulated", "--claim", "train/reward"]
    yield ["compare", "simulated", "--claim", "train/reward:last 20%:-1"]
    yield ["compare", "simulated", "--claim", "train/reward:steps 90-99:0.02"]
    yield ["compare", "simulated", "--seeds", "4-2"]
    yield ["compare", "simulated", "--seeds", "7,8"]
    yield ["compare", "simulated", "--interim", "x"]
    yield ["compare", "simulated", "--interim", "2,3"]
    yield ["compare", "simulated", "--arm", "treatment"]
    yield ["compare", "simulated", "--baseline", "nobody"]
    yield ["compare", "simulated", "--exclude", "treatment/seed-9"]
    yield ["compare", "simulated", "--reference", "nowhere.json"]
    yield ["compare", "simulated", "--wandb"]
    yield ["compare", "simulated", "--alias", "train/reward=score"]
    yield ["compare", "simulated", "--unknown"]
    yield ["compare"]
    yield ["compare", "alone"]
    edit(experiment_dir / "experiment.json", lambda content: content["recipe"].update(novelty=1))
    yield ["compare", "simulated"]
    edit(experiment_dir / "experiment.json", lambda content: content.pop("recipe"))
    yield ["compare", "simulated"]
    (experiment_dir / "experiment.json").write_text("nonsense")
    yield ["compare", "simulated"]
