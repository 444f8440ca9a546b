"""Runs as other trainers leave them on disk, written as `SOURCES` says they are: for tests and benchmarks.

Two arms, `old` and `new`, over three seeds, alike at their first step. Keys, layouts and quirks were read
from the trainers' sources at the commits named.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

ARMS, SEEDS, LAST = ("old", "new"), (1, 2, 3), 60
SOURCES = {
    "verl file logger": "volcengine/verl b178a3c, verl/utils/tracking.py: FileLogger",
    "NeMo-RL": "NVIDIA-NeMo/RL 7ea279a, nemo_rl/utils/logger.py: get_next_experiment_dir, TensorboardLogger",
    "SkyRL": "NovaSky-AI/SkyRL a956457, skyrl/train/utils/tracking.py: _TensorboardAdapter",
    "OpenRLHF": "OpenRLHF 3c3be62, openrlhf/trainer/ray: <tensorboard_dir>/<run_name>",
    "prime-rl": "PrimeIntellect-ai/prime-rl 559b447: outputs/<run>/metrics.jsonl",
    "torchtitan": "pytorch/torchtitan b5bcd76, components/metrics.py: outputs/tb/<time>",
    "Trainer checkpoints": "transformers 5.23.0, trainer.py: checkpoint-N/trainer_state.json",
    "LLaMA-Factory": "hiyouga/LLaMA-Factory ff6d4d1, train/callbacks.py: trainer_log.jsonl",
    "Fast-LLM": "ServiceNow/Fast-LLM 7d61a1b, engine/config_utils/run.py: nested, read as training/<key>",
    "PipelineRL": "ServiceNow/PipelineRL 58d3934: runs <exp>/{actor,preprocessor,finetune} of one group",
}
Rows = list[dict[str, float]]


def rows(arm: str, seed: int, every: int = 1, last: int = LAST) -> Rows:
    """One run: a reward that climbs from 0.1 to 0.8, alike in both arms at step 1."""
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, ARMS.index(arm)])
    found: Rows = []
    for step in range(1, last + 1):
        noise = shared.normal(0, 0.01) + (own.normal(0, 0.01) if step > 1 else 0.0)
        reward = 0.1 + 0.7 * (1 - np.exp(-step / 15)) + 0.02 * seed + noise
        found.append({"step": step, "reward": reward, "loss": 1.5 - reward, "grad_norm": 1 + abs(noise)})
    return [row for row in found if row["step"] % every == 0]


def named(row: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    return {names[key]: value for key, value in row.items() if key in names}


def every_run() -> Iterator[tuple[str, int]]:
    return ((arm, seed) for arm in ARMS for seed in SEEDS)


def write_csv(path: Path, found: list[dict[str, float]], **names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [names.get(key, key) for key in found[0]])
        writer.writeheader()
        writer.writerows({names.get(key, key): value for key, value in row.items()} for row in found)


def write_jsonl(path: Path, found: Sequence[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def write_events(folder: Path, found: Rows, names: Mapping[str, str], suffix: str = "") -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for row in found:
        for key, name in names.items():
            value = Summary.Value(tag=name, simple_value=float(row[key]))
            writer.add_event(Event(step=int(row["step"]), summary=Summary(value=[value])))
    writer.close()


# --- what people have themselves ---


def plain_csv(folder: Path) -> list[str]:
    for arm in ARMS:
        write_csv(folder / f"{arm}.csv", rows(arm, 1))
    return [str(folder / f"{arm}.csv") for arm in ARMS]


def odd_case(folder: Path) -> list[str]:
    for arm, seed in every_run():
        write_csv(
            folder / arm / f"run{seed}.csv", rows(arm, seed), step="Step", reward="Reward/mean", loss="Loss"
        )
    return [str(folder / arm) for arm in ARMS]


def seeds_in_file_names(folder: Path) -> list[str]:
    for arm, seed in every_run():
        write_csv(folder / arm / f"s{seed}.csv", rows(arm, seed))
    return [str(folder / arm) for arm in ARMS]


def files_of_both_arms(folder: Path) -> list[str]:
    for arm, seed in every_run():
        write_csv(folder / f"qwen_{arm}-{seed}_2026-11-20.csv", rows(arm, seed))
    return [str(path) for path in sorted(folder.glob("*.csv"))]


def long_csv(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.csv").open("w") as file:
        file.write("arm,seed,step,reward,loss\n")
        for arm, seed in every_run():
            file.writelines(
                f"{arm},{seed},{row['step']},{row['reward']},{row['loss']}\n" for row in rows(arm, seed)
            )
    return [str(folder / "results.csv")]


def melted_csv(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tidy.csv").open("w") as file:
        file.write("run,seed,iteration,metric,value\n")
        for arm, seed in every_run():
            for row in rows(arm, seed):
                for key in ("reward", "loss"):
                    file.write(f"{arm},{seed},{row['step']},{key},{row[key]}\n")
    return [str(folder / "tidy.csv")]


def wandb_chart_export(folder: Path) -> list[str]:
    """Two panels, a file each, every cell quoted."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = {(arm, seed): rows(arm, seed) for arm, seed in every_run()}
    for metric in ("reward", "loss"):
        header = ["Step"]
        for arm, seed in runs:
            header += [f"grpo-{arm}-s{seed} - train/{metric}{bound}" for bound in ("", "__MIN", "__MAX")]
        with (folder / f"wandb_export_{metric}.csv").open("w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerow(header)
            for index in range(LAST):
                cells: list[object] = [index + 1]
                for found in runs.values():
                    cells += [found[index][metric]] * 3
                writer.writerow(cells)
    return [str(folder)]


def tensorboard_download(folder: Path) -> list[str]:
    """The page's CSV of each chart: `run-<run>-tag-<tag>.csv`."""
    for arm, seed in every_run():
        for metric in ("reward", "loss"):
            found = [
                {"Wall time": 1.7e9, "Step": row["step"], "Value": row[metric]} for row in rows(arm, seed)
            ]
            write_csv(folder / f"run-{arm}_seed{seed}-tag-train_{metric}.csv", found)
    return [str(folder)]


# --- trainers ---

HF = {"loss": "loss", "reward": "reward", "grad_norm": "grad_norm"}


def trainer_checkpoints(folder: Path, every: int = 10) -> list[str]:
    """What TRL 1.16 leaves by default: no logger, the state in each checkpoint, logged every 10 steps."""
    for arm, seed in every_run():
        history: list[dict[str, float]] = []
        for row in rows(arm, seed, every):
            history.append(
                {**named(row, HF), "epoch": row["step"] / LAST, "step": row["step"], "learning_rate": 1e-5}
            )
            if row["step"] in (30, 60):
                path = folder / arm / f"out-seed{seed}" / f"checkpoint-{row['step']}" / "trainer_state.json"
                path.parent.mkdir(parents=True)
                path.write_text(json.dumps({"global_step": row["step"], "log_history": history}))
    return [str(folder / arm) for arm in ARMS]


def llama_factory(folder: Path) -> list[str]:
    for arm in ARMS:
        found = rows(arm, 1, 10)
        logged = [
            {
                "current_steps": row["step"],
                "total_steps": LAST,
                "loss": row["loss"],
                "lr": 1e-5,
                "percentage": 1.0,
            }
            for row in found
        ]
        write_jsonl(folder / arm / "trainer_log.jsonl", [*logged])
        state = [{"step": row["step"], "loss": row["loss"]} for row in found]
        (folder / arm / "trainer_state.json").write_text(json.dumps({"log_history": state}))
        write_jsonl(folder / arm / "generated_predictions.jsonl", [{"prompt": "1+1", "predict": "2"}])
    return [str(folder / arm) for arm in ARMS]


def verl_file_logger(folder: Path) -> list[str]:
    names = {"reward": "critic/score/mean", "loss": "actor/pg_loss", "grad_norm": "actor/grad_norm"}
    for arm, seed in every_run():
        found = [{"step": row["step"], "data": named(row, names)} for row in rows(arm, seed)]
        write_jsonl(folder / "gsm8k" / f"{arm}_seed{seed}.jsonl", [*found])
        dump = [{"input": "1+1", "output": "2", "score": 1.0, "step": 1}]
        write_jsonl(folder / "rollout_data" / f"{arm}_{seed}" / "1.jsonl", [*dump])
    return [str(folder)]


def prime_rl(folder: Path) -> list[str]:
    names = {"reward": "reward/all/mean"}
    for arm, seed in every_run():
        found: list[dict[str, object]] = []
        for row in rows(arm, seed):
            shared = {"step": row["step"], "time": 1.7e9 + row["step"]}
            found.append({**shared, "optim/grad_norm": row["grad_norm"], "optim/lr": 1e-6})
            found.append({**shared, **named(row, names), "mismatch_kl/all/mean": 1e-4})
            found.append({"inference/requests": 12.0, "time": 1.7e9})
        write_jsonl(folder / arm / f"gsm8k-seed{seed}" / "metrics.jsonl", found)
        (folder / arm / f"gsm8k-seed{seed}" / "configs").mkdir()
        trace = folder / arm / f"gsm8k-seed{seed}" / "rollouts" / "step_1" / "traces.jsonl"
        write_jsonl(trace, [{"prompt": "1+1"}])
    return [str(folder / arm) for arm in ARMS]


def nemo_rl(folder: Path) -> list[str]:
    """`logs/exp_NNN` for every start: an arm's folder holds its runs by number."""
    names = {"reward": "train/reward", "loss": "train/loss", "grad_norm": "train/grad_norm"}
    names |= {"step": "timing/train/total_step_time"}
    for arm in ARMS:
        for number, seed in enumerate(SEEDS, 1):
            run = folder / arm / "logs" / f"exp_{number:03d}"
            write_events(run / "tensorboard", rows(arm, seed), names)
            write_jsonl(run / "train_data_step1.jsonl", [{"content": "1+1", "rewards": 1.0}])
    return [str(folder / arm) for arm in ARMS]


def skyrl(folder: Path) -> list[str]:
    names = {"reward": "reward/avg_raw_reward", "loss": "policy/final_loss", "grad_norm": "policy/grad_norm"}
    for arm in ARMS:
        write_events(folder / arm / "tensorboard_log", rows(arm, 1), names)
    return [str(folder / arm / "tensorboard_log") for arm in ARMS]


def openrlhf(folder: Path) -> list[str]:
    names = {
        "reward": "train/rollout/reward_mean",
        "loss": "train/policy_loss",
        "grad_norm": "train/actor_grad_norm",
    }
    for arm, seed in every_run():
        write_events(folder / f"ppo_{arm}_seed{seed}", rows(arm, seed), names)
    return [str(folder)]


def torchtitan(folder: Path) -> list[str]:
    """Step 1 and every 10th; the second half after a restart, in another folder."""
    names = {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm"}
    for arm, seed in every_run():
        found = [row for row in rows(arm, seed) if row["step"] == 1 or row["step"] % 10 == 0]
        tb = folder / f"{arm}-seed{seed}" / "outputs" / "tb"
        write_events(tb / "20261120-0900", [row for row in found if row["step"] <= 30], names)
        write_events(tb / "20261120-1130", [row for row in found if row["step"] > 30], names)
    return [str(folder)]


LAYOUTS: dict[str, Callable[[Path], list[str]]] = {
    "two CSV files": plain_csv,
    "CSV, Step and Reward/mean": odd_case,
    "s1.csv, s2.csv": seeds_in_file_names,
    "files of both arms": files_of_both_arms,
    "long CSV": long_csv,
    "long CSV, melted": melted_csv,
    "wandb chart export": wandb_chart_export,
    "TensorBoard CSV download": tensorboard_download,
    "Trainer checkpoints": trainer_checkpoints,
    "LLaMA-Factory": llama_factory,
    "verl file logger": verl_file_logger,
    "prime-rl": prime_rl,
    "NeMo-RL": nemo_rl,
    "SkyRL": skyrl,
    "OpenRLHF": openrlhf,
    "torchtitan": torchtitan,
}
