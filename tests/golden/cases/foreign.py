"""Runs of other trainers, read from their logs."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.case import add_case, case, compare_command, compare_in_short
from tests.logs import layouts
from tests.logs.layouts import ARMS, Rows, every_run, rows, write_csv, write_jsonl
from tests.verdict.test_unpaired import write as write_independent

Commands = Iterator[Sequence[str]]
CLAIM = ["--claim", "train/reward:last 20%:0.05"]


def compared(*sources: str, claim: Sequence[str] = CLAIM) -> list[str]:
    return compare_command(*sources, *claim)


def _laid_out(layout: Callable[[Path], list[str]], claim: Sequence[str]) -> Callable[[Path], Commands]:
    def build(folder: Path) -> Commands:
        sources = [str(Path(source).relative_to(folder)) for source in layout(folder / "logs")]
        yield compare_in_short(*sources, *claim)
        yield compare_in_short(*sources)

    return build


LOSS = ["--claim", "train/loss:last 20%:0.05"]
LAYOUTS = {
    "two-csv-files": (layouts.plain_csv, CLAIM),
    "csv-of-other-names": (layouts.odd_case, CLAIM),
    "long-csv": (layouts.long_csv, CLAIM),
    "wandb-chart-export": (layouts.wandb_chart_export, CLAIM),
    "tensorboard-download": (layouts.tensorboard_download, CLAIM),
    "trainer-state": (layouts.trainer_checkpoints, CLAIM),
    "llama-factory": (layouts.llama_factory, LOSS),
    "verl-file-logger": (layouts.verl_file_logger, CLAIM),
    "prime-rl": (layouts.prime_rl, CLAIM),
}
for _name, (_layout, _claim) in LAYOUTS.items():
    add_case(f"foreign-{_name}", _laid_out(_layout, _claim))


def _logs(folder: Path, change: Callable[[str, int, Rows], Sequence[Mapping[str, object]]]) -> list[str]:
    for arm, seed in every_run():
        write_jsonl(folder / arm / f"seed-{seed}.jsonl", change(arm, seed, rows(arm, seed)))
    return [*ARMS]


@case
def foreign_tensorboard(folder: Path) -> Commands:
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    from tests.logs.test_fuzz import tensorboard_file

    for arm, seed in every_run():
        events = []
        for row in rows(arm, seed):
            tags = {"train/reward": row["reward"], "train/loss": row["loss"]}
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
            event = Event(step=int(row["step"]), wall_time=1.7e9 + row["step"], summary=Summary(value=values))
            events.append(event.SerializeToString())
        path = folder / f"{arm}/seed{seed}/events.out.tfevents.1700000000.trainer.1.0"
        path.parent.mkdir(parents=True)
        path.write_bytes(tensorboard_file(events))
    yield compared(*ARMS)
    yield compared("tb:old", "tb:new", claim=())


@case
def foreign_wandb(folder: Path) -> Commands:
    """Runs as wandb's client leaves them offline: configurations, a failed one, a group."""
    from tests.logs.test_fuzz import messages, wandb_file

    item = messages.HistoryItem
    for arm, seed in every_run():
        config = [
            messages.ConfigItem(key="seed", value_json=str(seed)),
            messages.ConfigItem(key="lr", value_json="0.1" if arm == "new" else "0.2"),
        ]
        run = {"run_id": f"{arm}{seed}", "display_name": f"{arm}-s{seed}", "run_group": "g", "project": "p"}
        records = [messages.Record(run={**run, "config": {"update": config}})]
        for row in rows(arm, seed):
            items = [
                item(key=f"train/{key}", value_json=str(row[key])) for key in ("reward", "loss", "grad_norm")
            ]
            records.append(messages.Record(history={"step": {"num": int(row["step"])}, "item": items}))
        failed = (arm, seed) == ("new", 2)
        records.append(messages.Record(exit={"exit_code": 1 if failed else 0}))
        path = folder / f"wandb/offline-run-20261120_09000{seed}-{arm}{seed}/run-{arm}{seed}.wandb"
        path.parent.mkdir(parents=True)
        path.write_bytes(wandb_file([record.SerializeToString() for record in records]))
    yield compared("wandb")
    yield compared("wandb", claim=())
    yield compared("wandb", "--exclude", "new/seed-2", "--group", "g")
    yield compared("wandb", "--group", "other")


@case
def foreign_welch(folder: Path) -> Commands:
    write_independent(folder, "old", range(5))
    write_independent(folder, "new", range(5, 9))
    yield compared("old", "new")
    yield compared("old", "new", "--unpaired")
    yield compared("old", "new", "--unpaired", claim=["--claim", "train/reward:last 20%:9 sigma"])
    yield compared("old", "new", claim=())


@case
def foreign_welch_mismatch(folder: Path) -> Commands:
    write_independent(folder, "old", range(5))
    write_independent(folder, "new", range(5, 9), shift=0.2)
    yield compared("old", "new", "--unpaired")
    yield compared("old", "new", "--unpaired", claim=["--claim", "train/reward:last 20%:30%"])


@case
def foreign_one_run_an_arm(folder: Path) -> Commands:
    for arm in ARMS:
        write_csv(folder / f"{arm}.csv", rows(arm, 1), reward="train/reward")
    yield compared("old.csv", "new.csv", claim=())
    yield compared("old.csv", "new.csv")
    yield compared("old=old.csv", "new=new.csv", "--unpaired")


@case
def foreign_interim(folder: Path) -> Commands:
    for arm in ARMS:
        for seed in range(6):
            write_csv(folder / f"{arm}/s{seed}.csv", rows(arm, seed), reward="train/reward")
    yield compared(*ARMS, "--interim", "3,6")
    yield compared(
        *ARMS, "--interim", "3,6", "--seeds", "0-3", claim=["--claim", "train/reward:last 20%:0.01"]
    )


@case
def foreign_steps_of_another_grid(folder: Path) -> Commands:
    sources = _logs(
        folder,
        lambda arm, _, logged: [row for row in logged if row["step"] % (4 if arm == "new" else 1) == 0],
    )
    yield compared(*sources)
    yield compared(*sources, claim=())


@case
def foreign_zero_based_against_one_based(folder: Path) -> Commands:
    def change(arm: str, seed: int, logged: Rows) -> Rows:
        return [{**row, "step": row["step"] - (arm == "new")} for row in logged]

    yield compared(*_logs(folder, change))


@case
def foreign_steps_begin_again(folder: Path) -> Commands:
    def change(arm: str, seed: int, logged: Rows) -> Rows:
        return (
            logged
            if arm == "old"
            else [*logged[:30], *({**row, "step": row["step"] - 30} for row in logged[30:])]
        )

    yield compared(*_logs(folder, change))


@case
def foreign_nan_and_text(folder: Path) -> Commands:
    def change(arm: str, seed: int, logged: Rows) -> list[dict[str, Any]]:
        odd = (arm, seed) == ("new", 2)
        return [
            {
                **row,
                "loss": math.nan if odd and row["step"] > 50 else row["loss"],
                "note": "n/a",
                "lr": "1e-6",
            }
            for row in logged
        ]

    yield compared(*_logs(folder, change))


@case
def foreign_reward_as_text(folder: Path) -> Commands:
    yield compared(
        *_logs(
            folder, lambda arm, seed, logged: [{**row, "reward": f"{row['reward']:.4f}"} for row in logged]
        )
    )


@case
def foreign_thousands_separators(folder: Path) -> Commands:
    for arm in ARMS:
        for seed in (1, 2, 3):
            lines = [f'{row["step"]:.0f},"{1000 * row["reward"]:,.3f}"\n' for row in rows(arm, seed)]
            path = folder / arm / f"s{seed}.csv"
            path.parent.mkdir(exist_ok=True)
            path.write_text("step,train/reward\n" + "".join(lines))
    yield compared(*ARMS, claim=["--claim", "train/reward:last 20%:50"])


@case
def foreign_byte_order_mark_and_unicode(folder: Path) -> Commands:
    for arm, theirs in zip(ARMS, ("größe", "β neu"), strict=True):
        for seed in (1, 2, 3):
            path = folder / theirs / f"seed-{seed}.jsonl"
            write_jsonl(path, rows(arm, seed))
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    yield compared("größe", "β neu")


@case
def foreign_copied_runs(folder: Path) -> Commands:
    yield compared(
        *_logs(folder, lambda arm, seed, logged: rows("old", 1) if (arm, seed) == ("new", 3) else logged)
    )
    for arm in ARMS:
        write_jsonl(folder / arm / "seed-3.jsonl", rows(arm, 1))
    yield compared(*ARMS)


@case
def foreign_empty_and_short_runs(folder: Path) -> Commands:
    sources = _logs(folder, lambda arm, seed, logged: logged[: 20 if (arm, seed) == ("new", 2) else 60])
    yield compared(*sources)
    (folder / "new/seed-2.jsonl").write_text("")
    yield compared(*sources)
    yield compared(*sources, "--exclude", "new/seed-2")


@case
def foreign_equal_first_steps(folder: Path) -> Commands:
    """Lengths alike at step one show that prompts were shared: another reward there counts."""
    for arm, shift in (("old", 0.0), ("new", 0.02)):
        for seed in (0, 1, 2):
            found = [
                {
                    "step": step,
                    "train/reward": 0.1 * step + shift,
                    "train/mean_gen_tokens_per_sample": 31.5 + seed,
                }
                for step in range(1, 5)
            ]
            write_jsonl(folder / arm / f"seed-{seed}.jsonl", found)
    yield compared(*ARMS, claim=["--claim", "train/reward:all:0.2"])


@case
def foreign_several_arms(folder: Path) -> Commands:
    rng = np.random.default_rng(5)
    for arm, shift in (("baseline", 0.0), ("near", 0.0), ("far", -0.2)):
        for seed in range(4):
            found = [
                {**row, "reward": row["reward"] + shift + 0.01 * rng.normal()} for row in rows("old", seed)
            ]
            write_jsonl(folder / "logs" / f"{arm}-s{seed}.jsonl", found)
    yield compared("logs")
    yield compared("logs", "--baseline", "far")


@case
def foreign_aliases_and_patterns(folder: Path) -> Commands:
    for arm, seed in every_run():
        write_csv(
            folder / f"logs/x_{arm}_{seed}.csv", rows(arm, seed), step="global_step", reward="score/mean"
        )
    options = [
        "--pattern",
        "x_{arm}_{seed}",
        "--alias",
        "train/reward=score/mean",
        "--step-column",
        "global_step",
    ]
    yield compared("logs", *options, "--baseline", "old")
    yield compared(
        "logs", "--pattern", "x_{arm}_{seed}", "--alias", "train/reward=score", "--baseline", "old"
    )
    yield compared("logs", "--pattern", "{arm}", "--baseline", "old")
    yield compared("logs", "--step-column", "iteration")


@case
def foreign_frozen(folder: Path) -> Commands:
    _logs(folder, lambda arm, seed, logged: logged)
    yield ["reference", "save", "old", *CLAIM, "--output", "reference.json"]
    yield compare_command("new", "--reference", "reference.json")
    yield compare_command("old", "--reference", "reference.json")


@case
def foreign_refusals(folder: Path) -> Commands:
    _logs(folder, lambda arm, seed, logged: logged)
    for name in ("a", "b"):
        write_csv(folder / f"unnamed/{name}.csv", rows("old", 1))
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("nothing\n")
    (folder / "config.json").write_text(json.dumps({"seed": 1}))
    yield ["compare", "old"]
    yield ["compare", "old", "old"]
    yield ["compare", "unnamed"]
    yield ["compare", "empty", "old"]
    yield ["compare", "notes.txt", "old"]
    yield ["compare", "csv:old", "new"]
    yield ["compare", "old", "new", "--claim", "train/rewrad:last 20%:0.05"]
    yield ["compare", "old", "new", "--claim", "train/reward:steps 200-300:0.05"]
    yield ["compare", "x=old", "x=new"]
    yield ["compare", "old", "new", "--versions-differ"]
    yield ["compare", "wandb:", "new"]
