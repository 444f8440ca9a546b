"""Tables of final scores and of scores per prompt: which columns name the runs, and what is refused."""

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest

from abrun.errors import StoreError
from abrun.logs import Log, read_log, read_logs
from abrun.runs.layout import RunName


def read(path: Path, text: str) -> dict[str, dict[str, list[float]]]:
    """Return the values of every metric of every run, by the run's name."""
    path.write_text(text)
    return values(read_logs(str(path)))


def values(logs: list[Log]) -> dict[str, dict[str, list[float]]]:
    return {log.name: {name: series.values.tolist() for name, series in log.metrics.items()} for log in logs}


FINAL = {"hf/seed-0": {"ifeval": [0.62], "gsm8k": [0.4]}, "mcore/seed-0": {"ifeval": [0.6], "gsm8k": [0.3]}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "arm,seed,ifeval,gsm8k\nhf,0,.62,.4\nmcore,0,.60,.3\n"),
        ("a.tsv", "Config\tSeed\tifeval\tgsm8k\nhf\t0\t0.62\t0.4\nmcore\t0\t0.60\t0.3\n"),
        ("a.csv", "model,seed,step,ifeval,gsm8k\nhf,0,235,0.62,0.4\nmcore,0,235,0.60,0.3\n"),
        (
            "a.csv",
            "arm,seed,task,score\nhf,0,ifeval,0.62\nhf,0,gsm8k,0.4\nmcore,0,gsm8k,0.3\nmcore,0,ifeval,0.6\n",
        ),
        (
            "a.csv",
            "arm,seed,metric,value\nhf,0,ifeval,0.62\nhf,0,gsm8k,0.4\nmcore,0,gsm8k,0.3\nmcore,0,ifeval,0.6\n",
        ),
        (
            "a.jsonl",
            '{"arm": "hf", "seed": 0, "ifeval": 0.62, "gsm8k": 0.4}\n'
            '{"arm": "mcore", "seed": 0, "ifeval": 0.6, "gsm8k": 0.3}\n',
        ),
        (
            "a.json",
            '[{"variant": "hf", "seed": 0, "ifeval": 0.62, "gsm8k": 0.4},'
            '{"variant": "mcore", "seed": 0, "ifeval": 0.6, "gsm8k": 0.3}]',
        ),
    ],
)
def test_one_row_of_final_scores_per_run(tmp_path: Path, name: str, text: str) -> None:
    assert read(tmp_path / name, text) == FINAL
    logs = read_logs(str(tmp_path / name))
    assert {log.axis for log in logs} == {"final"}
    assert [log.identity for log in logs] == [RunName(arm="hf", seed=0), RunName(arm="mcore", seed=0)]


def test_final_scores_of_a_data_frame_with_an_index(tmp_path: Path) -> None:
    frame = pd.DataFrame({"arm": ["hf", "mcore"], "seed": [0, 0], "ifeval": [0.62, 0.6], "gsm8k": [0.4, 0.3]})
    frame.to_csv(tmp_path / "a.csv.gz")
    assert gzip.decompress((tmp_path / "a.csv.gz").read_bytes()).startswith(b",arm")
    assert values(read_logs(str(tmp_path / "a.csv.gz"))) == FINAL
    frame.to_parquet(tmp_path / "a.parquet")
    assert values(read_logs(str(tmp_path / "a.parquet"))) == FINAL


def test_two_metrics_of_a_benchmark_and_a_benchmark_that_a_run_lacks(tmp_path: Path) -> None:
    text = "arm,seed,task,acc,f1\na,0,rte,0.5,0.4\na,0,drop,,0.3\nb,0,rte,0.6,0.5\n"
    assert read(tmp_path / "a.csv", text) == {
        "a/seed-0": {"rte/acc": [0.5], "rte/f1": [0.4], "drop/f1": [0.3]},
        "b/seed-0": {"rte/acc": [0.6], "rte/f1": [0.5]},
    }


def test_rows_without_a_seed_are_runs_without_one(tmp_path: Path) -> None:
    logs = read(tmp_path / "a.csv", "arm,ifeval\nhf,0.62\nhf,0.63\nmcore,0.60\n")
    assert [*logs] == ["hf/line 2", "hf/line 3", "mcore/line 4"]
    assert {log.identity for log in read_logs(str(tmp_path / "a.csv"))} == {None}


def test_a_model_column_names_runs_and_one_that_repeats_names_arms(tmp_path: Path) -> None:
    assert [*read(tmp_path / "a.csv", "checkpoint,x\n/x/hf-s0,0.5\n/x/hf-s1,0.6\n")] == [
        "/x/hf-s0",
        "/x/hf-s1",
    ]
    assert [*read(tmp_path / "a.csv", "model,x\nhf,0.5\nhf,0.6\nmc,0.6\n")] == [
        *("hf/line 2", "hf/line 3", "mc/line 4"),
    ]
    assert [*read(tmp_path / "a.csv", "seed,x\n0.0,0.5\n1.0,0.6\n")] == ["a/seed-0", "a/seed-1"]


def test_a_last_row_without_a_line_end_is_a_row(tmp_path: Path) -> None:
    assert [*read(tmp_path / "a.csv", "arm,seed,x\na,0,0.5\nb,0,0.25")] == ["a/seed-0", "b/seed-0"]
    (log, last_log) = read_logs(str(tmp_path / "a.csv"))
    assert log.notes == last_log.notes == ("its last line has no line end; it was read as a whole row",)
    assert [*read(tmp_path / "a.csv", "arm,seed,x,y\na,0,0.5,1\nb,0,0.2")] == ["a/seed-0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "arm,seed,ifeval\nhf,0,0.62\nhf,0,0.63\nmcore,0,0.6\n",
            "lines 2 and 3: two rows of arm=hf, seed=0, and no column with the step, the prompt or another "
            "seed; columns: 'arm', 'seed', 'ifeval'; name the step column with --step-column, or add a "
            "column 'seed' or 'prompt'",
        ),
        (
            "arm,seed,task,score\nhf,0,rte,0.62\nhf,0,rte,0.63\n",
            "lines 2 and 3: two rows of arm=hf, seed=0",
        ),
        ("arm,seed,ifeval\nhf,0,0.62\n,1,0.63\n", "line 3: no value in a column that names the run ('arm'"),
        (
            "benchmark,hf,mcore\nifeval,0.6,0.5\n",
            "name the step column with --step-column, or give final scores one row per run, with columns",
        ),
        ("arm,seed,ifeval\nhf,0,62.1%\nmc,0,60%\n", "column ifeval: got '62.1%'"),
        ("arm,seed,ifeval\nhf,0,sixty\nmcore,0,fifty\n", "column ifeval: got 'sixty'"),
    ],
)
def test_tables_that_are_refused_name_the_columns(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    try:
        logs = read_logs(str(path))
        assert not any(log.metrics for log in logs)
        problem = "; ".join(where for log in logs for where in log.unread.values())
    except StoreError as error:
        problem = str(error)
    assert message in problem and "\n" not in problem


def test_scores_of_a_prompt_with_several_samples_are_averaged(tmp_path: Path) -> None:
    text = "arm,seed,prompt,sample,correct\n" + "".join(
        f"{arm},{seed},{prompt},{sample},{correct}\n"
        for arm, seed, prompt, scores in (
            ("a", 0, 3, ("true", "False", 1, 1)),
            ("a", 0, 1, (0, 0)),
            ("b", 0, 1, (1,)),
            ("b", 0, 3, (1, 0)),
        )
        for sample, correct in enumerate(scores)
    )
    assert read(tmp_path / "a.csv", text) == {
        "a/seed-0": {"correct": [0.0, 0.75]},
        "b/seed-0": {"correct": [1.0, 0.5]},
    }
    logs = read_logs(str(tmp_path / "a.csv"))
    assert [log.metrics["correct"].steps.tolist() for log in logs] == [[1, 3], [1, 3]]
    assert {log.axis for log in logs} == {"prompts"}


def test_long_prompts_that_begin_alike_are_told_apart_in_every_format(tmp_path: Path) -> None:
    shared = "Question: " * 100
    rows = [{"arm": arm, "prompt": shared + str(end), "score": end} for arm in "ab" for end in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pd.DataFrame(rows).to_csv(tmp_path / "b.csv", index=False)
    pd.DataFrame(rows).to_parquet(tmp_path / "c.parquet")
    (first, *_), *others = (read_logs(str(path)) for path in sorted(tmp_path.iterdir()))
    prompts = first.metrics["score"].steps.tolist()
    assert len(prompts) == 5
    for logs in others:
        assert [log.metrics["score"].steps.tolist() for log in logs] == [prompts, prompts]
        assert logs[0].metrics["score"].values.tolist() == first.metrics["score"].values.tolist()


def test_a_log_with_steps_is_no_table_of_scores(tmp_path: Path) -> None:
    text = "step,prompt,reward\n1,a,0.5\n2,b,0.75\n"  # a training log with the first prompt of each step
    assert read(tmp_path / "a.csv", text) == {"a.csv": {"reward": [0.5, 0.75]}}
    text = "arm,seed,step,reward\na,0,1,0.5\na,0,2,0.6\nb,0,1,0.5\nb,0,2,0.7\n"
    assert read(tmp_path / "a.csv", text) == {
        "a/seed-0": {"reward": [0.5, 0.6]},
        "b/seed-0": {"reward": [0.5, 0.7]},
    }
    path = tmp_path / "b.csv"  # one run of an external trainer, whatever its columns name
    path.write_text("arm,seed,step,reward\na,0,1,0.5\n")
    assert read_log(path, "csv").axis == "steps"


def test_logs_with_steps_come_before_tables_of_scores_next_to_them(tmp_path: Path) -> None:
    for arm in ("a", "b"):
        (tmp_path / f"{arm}-s0.csv").write_text("step,reward\n1,0.5\n2,0.6\n")
    for number in range(5):
        (tmp_path / f"scores{number}.csv").write_text("arm,seed,ifeval\na,0,0.5\nb,0,0.6\n")
    logs = read_logs(str(tmp_path))
    assert [log.name for log in logs] == ["a-s0.csv", "b-s0.csv"]
    note = "read the runs with steps, ignored the final scores of 10 runs"
    assert logs[0].guesses[-1] == f"{tmp_path}: {note}"
