"""wandb: what its real client wrote offline, and a server that its real client talks to."""

import math
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from abrun.errors import StoreError
from abrun.logs import read_log, read_logs
from abrun.logs.naming import name_runs
from abrun.runs.layout import RunName
from tests.logs import server
from tests.logs.test_fuzz import messages, wandb_file
from tests.snapshot import Snapshot

KEY = "a" * 40


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three runs of the real client: whole, failed, and one of 300 steps whose records span blocks."""
    import wandb

    folder = tmp_path_factory.mktemp("offline")

    def settings() -> wandb.Settings:  # init changes what it is given
        return wandb.Settings(console="off", silent=True, x_disable_stats=True)

    whole = wandb.init(
        mode="offline", dir=folder, project="p", group="g", job_type="baseline", name="baseline-s3",
        config={"seed": 3, "optim": {"lr": 1e-3}, "_private": 1}, settings=settings(),
    )  # fmt: skip
    for step in range(1, 5):
        whole.log(
            {
                "train/reward": step / 10,
                "train/loss": math.nan if step == 2 else math.inf if step == 3 else 0.5,
                "nested": {"a": step},
                "text": "hi",
                "flag": True,
                "histogram": wandb.Histogram([1.0, 2.0]),
            },
            step=step,
        )
    whole.config["late"] = {"x": [1, 2]}
    whole.finish()
    failed = wandb.init(
        mode="offline", dir=folder, project="p", group="other", job_type="treatment", name="odd \x1b[31m<b>",
        config={"data": {"seed": 4}}, settings=settings(),
    )  # fmt: skip
    for step in range(3):  # as transformers logs: its own step, and a table in a row of its own
        failed.log({"train/reward": float(step), "train/global_step": 10 * step})
        failed.log({"completions": wandb.Histogram([1.0])})
    failed.finish(exit_code=3)
    long = wandb.init(mode="offline", dir=folder, project="p", id="long", settings=settings())
    for step in range(300):
        long.log({f"metric/{index}": step + index / 7 for index in range(60)}, step=step)
    long.finish()
    wandb.teardown()  # finish returns while the client's other process still writes the file
    yield folder


def test_offline_runs_are_read_whole(offline: Path) -> None:
    logs = {log.name: log for log in read_logs(str(offline))}
    assert len(logs) == 3
    one = logs["baseline-s3"]
    assert (one.status, one.failure, one.group, one.job_type) == ("finished", "", "g", "baseline")
    assert one.config == {"seed": 3, "optim.lr": 1e-3, "_private": 1, "late.x": [1, 2]}
    assert sorted(one.metrics) == ["nested/a", "train/loss", "train/reward"]
    assert one.metrics["train/reward"].steps.tolist() == [1, 2, 3, 4]
    assert one.metrics["train/reward"].values.tolist() == [0.1, 0.2, 0.3, 0.4]
    loss = one.metrics["train/loss"].values.tolist()
    assert loss[0] == loss[3] == 0.5 and math.isnan(loss[1]) and loss[2] == math.inf
    assert one.environment is not None
    assert one.environment["python"].count(".") == 2 and len(one.environment["hosts"]) == 1
    assert "numpy" in one.environment["versions"] and "pytest" not in one.environment["versions"]
    assert one.notes == ()


def test_records_that_span_blocks(offline: Path) -> None:
    (log,) = [log for log in read_logs(str(offline)) if log.run_id == "long"]
    assert len(log.metrics) == 60
    assert all(len(series) == 300 for series in log.metrics.values())
    assert log.metrics["metric/59"].value_at(299) == 299 + 59 / 7
    assert "offline-run-" in log.name  # it has no name of its own


def test_a_failed_run_with_its_own_steps_and_an_odd_name(offline: Path) -> None:
    (log,) = [log for log in read_logs(str(offline)) if log.status == "failed"]
    assert log.failure == "exit code 3"
    assert log.name == "odd \\x1b[31m<b>"
    assert log.metrics["train/reward"].steps.tolist() == [0, 10, 20]  # not wandb's count of log calls
    assert log.notes == ()


def test_groups(offline: Path) -> None:
    assert [log.name for log in read_logs(str(offline), group="g")] == ["baseline-s3"]
    with pytest.raises(StoreError, match="--group: got 'x'; available: 'g', 'other'"):
        read_logs(str(offline), group="x")


def _copy_of(offline: Path, run: str, folder: Path) -> Path:
    (file,) = [log.place for log in read_logs(str(offline)) if log.run_id == run or log.name == run]
    return Path(shutil.copytree(Path(file).parent, folder / Path(file).parent.name)) / Path(file).name


@pytest.mark.parametrize("kept", [0, 3, 7, 9, 100, 5000, 70_000, -1, -30])
def test_torn_files_are_read_to_their_last_whole_record(offline: Path, tmp_path: Path, kept: int) -> None:
    file = _copy_of(offline, "long", tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    for log in (read_log(tmp_path, "wandb"), read_log(file, "wandb"), *read_logs(str(tmp_path))):
        rows = max((len(series) for series in log.metrics.values()), default=0)
        assert rows < 300 if kept >= 0 else rows == 300
        assert log.status in ("running", "unknown") and log.notes
        assert all(series.value_at(0) == int(name[7:]) / 7 for name, series in log.metrics.items())
    assert kept < 70_000 or rows > 10  # type: ignore[possibly-undefined]


def test_a_damaged_record_ends_the_reading(offline: Path, tmp_path: Path) -> None:
    file = _copy_of(offline, "long", tmp_path)
    content = bytearray(file.read_bytes())
    content[100_000] ^= 0xFF
    file.write_bytes(content)
    (log,) = read_logs(str(file))
    assert 10 < len(log.metrics["metric/0"]) < 300
    assert any(" damaged " in note for note in log.notes)


def test_a_resumed_run_is_one_run(offline: Path, tmp_path: Path, snapshot: Snapshot) -> None:
    first = _copy_of(offline, "baseline-s3", tmp_path)
    again = tmp_path / f"offline-run-29991231_235959-{first.stem.removeprefix('run-')}"
    shutil.copytree(first.parent, again)
    (log,) = read_logs(str(tmp_path))
    assert log.metrics["train/reward"].steps.tolist() == [1, 2, 3, 4]
    snapshot(log.notes)
    assert read_log(tmp_path, "wandb").metrics["train/reward"].value_at(4) == 0.4


@pytest.mark.parametrize(
    "records",
    [
        [b"\xff\xff\xff"],  # which no message is
        [messages.Record(config={"remove": [{}]}).SerializeToString()],
        [messages.Record(environment={"gpu_type": "x", "gpu_count": 2**32 - 1}).SerializeToString()],
        [
            messages.Record(
                run={"config": {"update": [{"nested_key": ["a"] * 3000, "value_json": "1"}]}}
            ).SerializeToString()
        ],
    ],
)
def test_records_that_no_client_writes(tmp_path: Path, records: list[bytes], snapshot: Snapshot) -> None:
    (tmp_path / "run-x.wandb").write_bytes(wandb_file(records))
    (log,) = read_logs(str(tmp_path))
    assert log.metrics == {} and not log.config
    snapshot(" ".join(log.notes))
    if log.environment:
        assert len(log.environment["devices"]) == 1024


def test_parts_of_a_record_come_in_order(tmp_path: Path) -> None:
    """Many empty ones were quadratic, and the end of another record's was taken for this one's."""
    middle = struct.pack("<IHB", zlib.crc32(b"\x03"), 0, 3)
    (tmp_path / "run-x.wandb").write_bytes(wandb_file([b""])[:7] + middle * 4000)
    (log,) = read_logs(str(tmp_path))
    assert "28000 bytes, from byte 7 on" in log.notes[0]


def test_garbage_is_one_line(tmp_path: Path, snapshot: Snapshot) -> None:
    (tmp_path / "run-x.wandb").write_bytes(os.urandom(4096))
    with snapshot.refused(StoreError):
        read_logs(str(tmp_path))


# --- online ---


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rows = [
        {"_step": 0, "_runtime": 1.0, "train/reward": 0.5, "nested": {"a": 1}},
        {"_step": 1, "train/reward": "NaN", "histogram": {"_type": "histogram", "values": [1]}},
        {"_step": 2000, "train/reward": 0.75},
    ]
    runs = [
        server.run("a1", displayName="baseline-s0", jobType="baseline", group="g", rows=rows),
        server.run(
            "b1", displayName="treatment-s0", jobType="treatment", group="g", state="crashed", rows=rows
        ),
        server.run("c1", displayName="later", group="other", state="running"),
    ]
    cache = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    with server.serving("proj", runs) as url:
        patch.setenv("WANDB_BASE_URL", url)
        patch.setenv("WANDB_API_KEY", KEY)
        patch.setenv("WANDB_CACHE_DIR", str(cache))
        patch.setenv("WANDB_DIR", str(cache))
        import wandb

        wandb.teardown()  # settings are read once a process
        yield
    patch.undo()
    wandb.teardown()


def test_a_project_on_a_server(online: None) -> None:
    first, second = read_logs("wandb:team/proj", group="g")
    assert (first.name, first.status, first.job_type, first.run_id) == (
        "baseline-s0",
        "finished",
        "baseline",
        "a1",
    )
    assert (second.status, second.failure) == ("failed", "wandb says crashed")
    assert first.place == "wandb:team/proj/a1"
    assert first.config == {"seed": 0, "optim.lr": 1}
    reward = first.metrics["train/reward"]
    assert (
        reward.steps.tolist() == [0, 1, 2000]
        and math.isnan(reward.values[1])
        and reward.value_at(2000) == 0.75
    )
    assert sorted(first.metrics) == ["nested/a", "train/reward"]
    assert first.environment == {
        "python": "3.11.7",
        "hosts": ["node-1"],
        "devices": ["NVIDIA H100"] * 2,
        "versions": {"torch": "2.9.0", "vllm": "0.26.1"},
    }
    assert name_runs([first, second]) == [RunName(arm="baseline", seed=0), RunName(arm="treatment", seed=0)]


def test_one_run_on_a_server_that_logged_nothing(online: None) -> None:
    (log,) = read_logs("wandb:team/proj/c1")
    assert (log.name, log.status, log.metrics) == ("later", "running", {})


@pytest.mark.parametrize(
    ("source", "group"),
    [("wandb:team/nothing", None), ("wandb:team/proj/nothing", None), ("wandb:team/proj", "x")],
)
def test_what_is_not_on_the_server_is_one_line(online: None, source: str, group: str | None) -> None:
    with pytest.raises(StoreError) as refused:
        read_logs(source, group=group)
    assert str(refused.value).startswith(source) and "\n" not in str(refused.value)
    assert "check the names" in str(refused.value)


def test_without_a_key_it_says_so_and_does_not_ask(
    online: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    with pytest.raises(StoreError, match="no API key; set WANDB_API_KEY, or run: wandb login"):
        read_logs("wandb:team/proj")


def test_a_server_that_cannot_be_reached_is_one_line(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()
    with pytest.raises(
        StoreError, match=r"server http://127.0.0.1:9 cannot be reached: .*refused; check the"
    ):
        read_logs("wandb:team/proj")


def _stored_run(path: Path, name: str, rows: list[dict[str, float]], steps: dict[str, str]) -> None:
    """An offline run of the client's messages; `steps`: what define_metric said."""
    records = [messages.Record(run={"run_id": path.name, "display_name": name, "run_group": "exp"})]
    records += [
        messages.Record(metric={"glob_name": key, "step_metric": step}) for key, step in steps.items()
    ]
    for number, row in enumerate(rows):
        items = [{"nested_key": [key], "value_json": str(value)} for key, value in row.items()]
        records.append(messages.Record(history={"item": items, "step": {"num": number}}))
    records.append(messages.Record(exit={"exit_code": 0}))
    path.mkdir(parents=True)
    (path / f"run-{path.name}.wandb").write_bytes(wandb_file([one.SerializeToString() for one in records]))


def test_every_metric_over_the_step_that_was_defined_for_it(tmp_path: Path) -> None:
    """As slime logs: rollouts and updates count apart, an evaluation has a step of its own."""
    rows = [
        {"rollout/step": 0, "rollout/raw_reward": 0.1},
        {"train/step": 0, "train/loss": 1.0},
        {"train/step": 1, "train/loss": 0.9},
        {"rollout/step": 1, "rollout/raw_reward": 0.2},
        {"eval/step": 1, "eval/gsm8k": 0.5},
        {"train/step": 2, "train/loss": 0.8},
        {"odd": 7.0},
    ]
    _stored_run(
        tmp_path / "a", "a", rows, {f"{one}/*": f"{one}/step" for one in ("rollout", "train", "eval")}
    )
    (log,) = read_logs(f"wandb:{tmp_path}")
    found = {name: (one.steps.tolist(), one.values.tolist()) for name, one in log.metrics.items()}
    assert found == {
        "rollout/raw_reward": ([0, 1], [0.1, 0.2]),
        "train/loss": ([0, 1, 2], [1.0, 0.9, 0.8]),
        "eval/gsm8k": ([1], [0.5]),
        "odd": ([6], [7.0]),
    }


def test_the_three_runs_of_pipelinerl_are_one(tmp_path: Path) -> None:
    parts = {
        "actor": [{"actor/reward_mean": 0.4}],
        "preprocessor": [{"preprocessor/published_samples": 8}],
        "finetune": [{"rl/reward": 0.5, "rl/ess": 0.9}],
    }
    for exp in ("old-s1", "new-s1"):
        for part, rows in parts.items():
            _stored_run(tmp_path / f"{exp}-{part}", f"{exp}/{part}", rows, {})
    logs = read_logs(f"wandb:{tmp_path}")
    assert [log.name for log in logs] == ["new-s1", "old-s1"]
    assert {*logs[0].metrics} == {
        "actor/reward_mean",
        "preprocessor/published_samples",
        "rl/reward",
        "rl/ess",
    }
