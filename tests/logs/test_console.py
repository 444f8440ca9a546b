"""Console output: lines with a step and metrics among others, as trainers print and people post them."""

import time
from pathlib import Path

import pytest

from abrun.errors import StoreError
from abrun.logs import read_logs
from abrun.logs.console import MAX_LINE_CHARACTERS
from tests.logs.test_spellings import guesses, written
from tests.logs.test_tables import one, values

TITAN = "\x1b[31mstep: {s}  \x1b[32mloss:  {x}  \x1b[33mmemory: 10.20GiB(12.34%)  \x1b[34mtps: 1,234\x1b[39m"
MEGATRON = (
    " [2025-01-01 00:00:01.5] iteration {s:8d}/     500 | elapsed time per iteration (ms): 12.5 | lm loss: "
    "{x:.6E} | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


@pytest.mark.parametrize(
    ("line", "metric", "others"),
    [
        ("step:{s}/100 val_loss:{x} train_time:12ms step_avg:95.0ms", "val_loss", {"train_time", "step_avg"}),
        ("step={s} loss={x} host=node1 time=12:30:01", "loss", set()),
        ("iter {s}: loss {x}, lr 1e-4, time 12.3ms, mfu -100.00%", "loss", {"lr", "time", "mfu"}),
        ("step {s}: train loss {x}, val loss 2.2", "train loss", {"val loss"}),
        ("iter {s} loss {x} lr 0.1", "loss", {"lr"}),
        ("step 0{s}/21400 (0.05%) | loss: {x} | tok/sec: 1,234", "loss", {"tok/sec"}),
        ("step {s}/19560 | loss {x} (+1.2z)| lr 2.1e-06 | 12.5 ms | 12.3% bf16 MFU", "loss", {"lr"}),
        ("[rank0]:2025-05-16 10:00:01,123 - root - INFO - " + TITAN, "loss", {"memory", "tps"}),
        (
            MEGATRON,
            "lm loss",
            {"elapsed time per iteration (ms)", "number of skipped iterations", "number of nan iterations"},
        ),
        ("(TaskRunner pid=12) step:{s} - actor/entropy:np.float64(0.5) - acc/mean@1:{x}", "acc/mean@1", None),
        ("2025-01-01 12:34:56 INFO train.py:12 {{'loss': {x}, 'step': {s}, 'kl': nan}}", "loss", {"kl"}),
        ('INFO {{"step": {s}, "loss": {x}, "eval": {{"acc": 0.5}}}}', "loss", {"eval/acc"}),
        (
            "  5%|#  | 5/100 [00:01<00:10]\rStep {s}/100 - {{'reward': tensor({x}), 'ok': True}}",
            "reward",
            set(),
        ),
        ("Epoch {s}/10 loss: {x} - val_loss: 2.3", "loss", {"epoch", "val_loss"}),
        (
            'INFO | train_inner | {{"epoch": 1, "update": 0.1, "num_updates": "{s}", "loss": "{x}"}}',
            "loss",
            None,
        ),
        (
            "[Rank 0] step={s}, skipped=0, lr=[1e-4], mom=[[0.9, 0.95]], loss={x}",
            "loss",
            {"skipped", "lr", "mom"},
        ),
        ("Iter {s}: Train loss {x}, It/sec 1.2, Peak mem 12.1 GB", "Train loss", {"It/sec", "Peak mem"}),
        ("s:{s} trl:{x} lr:0.0018 norm:0.2", "trl", {"lr", "norm"}),
        ("{s} {x}", "loss", set()),
        ("{s} {x} 2.5\n# the end", "loss", None),
    ],
)
def test_lines_of_trainers(tmp_path: Path, line: str, metric: str, others: set[str] | None) -> None:
    start = "# step loss grad_norm\n" if line[:3] == "{s}" else "Running Python 3.12\nsaved 3 files\n"
    content = start + "".join(line.format(s=s, x=s / 8) + "\n" for s in (3, 4, 5))
    log = one(written(tmp_path / "train_seed0.log", content))
    assert values(log, metric) == {3: 0.375, 4: 0.5, 5: 0.625} and log.name == "train_seed0.log"
    assert others is None or log.metrics.keys() == {metric, *others}


def test_dictionaries_of_transformers_count_the_logs_of_an_epoch(tmp_path: Path) -> None:
    rows = [f"{{'loss': '{x}', 'grad_norm': 1.5, 'epoch': '{x}'}}" for x in (0.5, 1.0, 1.5)]
    rows += ["{'eval_loss': 2.5, 'epoch': 1.5}", "{'train_runtime': 12.5, 'epoch': 1.5}"]
    log = one(written(tmp_path / "a.out", "\n".join(rows)))
    assert values(log, "train/loss") == {1: 0.5, 2: 1.0, 3: 1.5} and values(log, "eval/loss") == {3: 2.5}
    assert "no line has a step: the logs are counted" in guesses([log])


def test_rounded_epochs_that_repeat_replace_nothing(tmp_path: Path) -> None:
    rows = [{"loss": x, "epoch": 0.01 * (x > 2)} for x in (1, 2, 3, 4)]
    assert list(values(one(written(tmp_path / "a.out", "\n".join(map(str, rows)))), "train/loss")) == [
        1,
        2,
        3,
        4,
    ]


def test_tables_printed_after_each_step(tmp_path: Path) -> None:
    box = "╭────┬────╮\n│ reward/avg │ {x:.4e} │ n │ 64 │\n│ name │ text │\n├────┼────┤\n│ lr │ 1e-05 │\n"
    lines = [
        f"INFO: Step {s}/9 Train step {s}/9 done.\n\x1b[0m\n\x1b[32m{box.format(x=s / 8)}\x1b[0m"
        for s in (3, 4)
    ]
    log = one(written(tmp_path / "main.log", "| 0 | 1 |\n| util | 5 |\n" + "".join(lines)))
    assert log.metrics.keys() == {"reward/avg", "n", "lr"} and values(log, "reward/avg") == {3: 0.375, 4: 0.5}


def test_source_code_and_other_ranks_are_no_metrics(tmp_path: Path) -> None:
    code = "if step == 0: lr = 1\nx = 1 if step != 3 else 2\nself.step = 0; lr = 2\nprint0(f'step:{step}')\n"
    code = f"import torch\n{code}a scale of step 2 is as good as 3\n{'=' * 40}\n"
    lines = [f"[rank{rank}]: step:{step} loss:{rank} step_avg:nanms" for step in (1, 2) for rank in (0, 1)]
    log = one(written(tmp_path / "a.txt", code + "\n".join(lines) + "\nsee info of step 3: more info\n"))
    assert log.metrics.keys() == {"loss", "step_avg"} and values(log, "loss") == {1: 0.0, 2: 0.0}
    assert log.notes == ("2 lines of other ranks than 0 left out",)


def test_a_stated_seed_is_configuration_and_a_unit_that_changes_is_left_out(tmp_path: Path) -> None:
    log = one(written(tmp_path / "a.txt", "seed: 7\nstep 1 loss: 1 t: 59s\nstep 2 loss: 2 t: 1m\nstep 3\n"))
    assert log.config == {"seed": 7} and log.metrics.keys() == {"loss"}
    assert log.notes == ("t: left out, its unit changes",)


def test_steps_that_begin_again_with_each_epoch_are_refused(tmp_path: Path) -> None:
    lines = [f"Epoch [{e}/2], Step [{s}/9], Loss: {s}" for e in (1, 2) for s in (1, 2, 9)]
    path = written(tmp_path / "a.log", "\n".join(lines))
    with pytest.raises(StoreError, match=r"a\.log: its steps begin again with each epoch; .* --step-column"):
        read_logs(str(path))
    assert values(one(path, "epoch"), "Loss") == {1: 9.0, 2: 9.0}
    resumed = "\n".join(f"epoch 1 step {s} loss: {s}" for s in (1, 2, 3, 2, 3, 4))
    assert list(values(one(written(tmp_path / "b.log", resumed)), "loss")) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "content", ["", "hello\n", "step:1 loss:0.5\n", "1 2\n3 4\nsome\ntext\n", "1 2 3\n2 3 4\n", "3 1\n2 1\n"]
)
def test_other_text_is_no_run_and_the_error_shows_the_way_to_a_table(tmp_path: Path, content: str) -> None:
    with pytest.raises(StoreError, match=r"a\.txt: console output without metrics by step.*write a CSV file"):
        read_logs(str(written(tmp_path / "a.txt", content)))


def test_other_logs_and_other_texts_beside_them_are_not_disturbed(tmp_path: Path) -> None:
    written(tmp_path / "requirements.txt", "numpy\n")
    for seed in (0, 1):
        written(tmp_path / f"seed-{seed}.log", "step:1 loss:1\nstep:2 loss:2\n")
    written(tmp_path / "seed-2.log", "Traceback\n")
    logs = read_logs(str(tmp_path))
    assert [(log.name, log.status) for log in logs] == [
        ("seed-0.log", "unknown"),
        ("seed-1.log", "unknown"),
        ("seed-2.log", "unreadable"),
    ]
    assert "requirements" not in guesses(logs)
    written(tmp_path / "a.csv", "step,loss\n1,0.5\n2,0.5\n")
    (log,) = read_logs(str(tmp_path))
    assert log.name == "a.csv" and not log.guesses


@pytest.mark.parametrize(
    "line",
    [
        *("step 1 " + "a " * 30_000, "step " + "1" * 60_000 + "x", "step " + "1,000" * 12_000 + "x"),
        *(
            "{'" * 30_000,
            "step {'a': " * 6000 + "}" * 6000,
            "step np.float64(" * 4000,
            "step" + ": " * 30_000,
        ),
        *("step " + "1/" * 30_000, " " * 60_000 + "step", "step " + "(" * 60_000, "step \x1b[" * 8000),
        *("step:1 loss:1 " * MAX_LINE_CHARACTERS, "step:1 " + "9" * 60_000),
    ],
)
def test_hostile_lines_end_soon(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "a.log", f"{line}\nstep:1 loss:1\nstep:2 loss:2\n")
    start_s = time.process_time()
    assert values(one(path), "loss") == {1: 1.0, 2: 2.0}
    assert time.process_time() - start_s < 2.0


def test_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"a\.out: binary; expected console output"):
        read_logs(str(written(tmp_path / "a.out", b"\x7fELF\0\1\n")))
