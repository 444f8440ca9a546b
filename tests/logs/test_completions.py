"""Completions of other trainers: files as verl, TRL and NeMo-RL write them, by their writers' sources."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import StoreError
from abrun.logs.completions import read_completions, read_run_samples


def verl(folder, step, answers):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"input": prompt, "output": text, "gts": "4", "score": score, "step": step, "acc": score}
        for prompt, text, score in answers
    ]
    (folder / f"{step}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def test_verl_s_dumps_are_read_by_step(tmp_path):
    verl(tmp_path, 10, [("2+2?", "five", 0.0), ("2+2?", "4", 1.0), ("1+1?", "2", 1.0)])
    verl(tmp_path, 2, [("2+2?", "no", 0.0)])
    found = read_completions(tmp_path)
    assert list(found) == [2, 10]
    first, second = found[10]  # of one prompt's group the first
    assert (first.prompt, first.text, first.reward) == ("2+2?", "five", 0.0)
    assert (second.text, second.logprob_error, second.truncated) == ("2", None, None)


@pytest.mark.parametrize("mode", ["", "train"])
def test_trl_s_tables_are_read(tmp_path, mode):
    folder = tmp_path / "completions" / mode
    folder.mkdir(parents=True)
    rows = {"step": [5], "prompt": [[{"role": "user", "content": "2+2?"}]], "completion": ["4"]}
    rows |= {"exact": [1.0], "advantage": [0.7]}
    pq.write_table(pa.table(rows), folder / "completions_00005.parquet")
    ((sample,),) = read_completions(tmp_path).values()
    assert (sample.prompt, sample.text, sample.reward) == ("2+2?", "4", 1.0)
    pq.write_table(pa.table({**rows, "other": [0.5]}), folder / "completions_00005.parquet")
    ((sample,),) = read_completions(tmp_path).values()
    assert sample.reward is None  # two reward functions, whose weights the table does not say


def test_nemo_rl_s_training_data_are_read(tmp_path, snapshot):
    rows = [
        {"content": [["You add.", "2+2?", text]], "rewards": [reward], "input_lengths": [9], "idx": number}
        for number, (text, reward) in enumerate([("five", 0.0), ("4", 1.0)])
    ]
    (tmp_path / "train_data_step12.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "val_data_step12.jsonl").write_text("{}\n")
    ((step, (sample,)),) = read_completions(tmp_path).items()
    assert (step, sample.prompt, sample.text, sample.reward) == (12, "You add.\n2+2?", "five", 0.0)
    distilled = {"content": [["2+2?", "4"]], "input_lengths": [4], "idx": 0}
    (tmp_path / "train_data_step12.jsonl").write_text(json.dumps(distilled) + "\n")
    ((sample,),) = read_completions(tmp_path).values()
    assert sample.reward is None
    for broken in ('{"content": ["2+2?4"]}', '{"content": [["4"]]}', "[]"):
        (tmp_path / "train_data_step12.jsonl").write_text(broken + "\n")
        with snapshot.refused(StoreError):
            list(read_completions(tmp_path).values())


def test_metrics_of_a_seed_are_no_completions(tmp_path):
    (tmp_path / "0.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert not read_completions(tmp_path) and not read_run_samples(tmp_path / "0.jsonl")


def test_a_torn_dump_is_one_line(tmp_path, snapshot):
    verl(tmp_path, 1, [("2+2?", "4", 1.0)])
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"input": "x"')
    with snapshot.refused(StoreError):
        list(read_completions(tmp_path).values())


def test_two_foreign_runs_stand_side_by_side(tmp_path):
    verl(tmp_path / "a/rollout_data", 3, [("2+2?", "four", 1.0)])
    verl(tmp_path / "b/rollout_data", 3, [("2+2?", "five", 0.0)])
    result = CliRunner().invoke(app, ["completions", str(tmp_path / "a"), "--against", str(tmp_path / "b")])
    assert result.exit_code == 0, result.output
    assert "four" in result.output and "five" in result.output and "reward 0" in result.output
    empty = CliRunner().invoke(app, ["completions", str(tmp_path)])
    assert empty.exit_code != 0
