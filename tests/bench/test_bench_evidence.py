"""What of an experiment is launched and packed."""

import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from abrun.runs.files import write_json
from abrun.verdict.verdict_file import as_json
from tests.bench.bench_evidence import ORDER, SAMPLE, Evidence
from tests.verdict.verdicts import VERDICT


@pytest.mark.parametrize("name", ORDER)
def test_its_command_plans_each_recipe(name: str, tmp_path: Path) -> None:
    evidence = Evidence(name, tmp_path, ["cluster.gpus_per_node=0", f"model.path={tmp_path}"])
    words = evidence.command
    assert words[words.index("launch") + 1] == str(evidence.recipe) and "--resume" not in words
    assert words.count("--set") == 2 and words[-3:-1] == ["--runs-dir", str(tmp_path / "runs")]
    evidence.directory.mkdir(parents=True)
    assert "--resume" in evidence.command


@pytest.mark.parametrize(
    ("command", "verdict", "done"),
    [
        ("exit 0", "MATCH", True),
        ("exit 0", "INVALID", False),  # a later call may end what was not finished
        ("exit 1", None, False),
        ("sleep 60", None, False),  # beyond the limit
    ],
)
def test_whatever_was_begun_is_packed_without_weights(
    command: str, verdict: str | None, done: bool, tmp_path: Path
) -> None:
    evidence = Evidence("demo", tmp_path, [])
    run = evidence.directory / "baseline" / "seed-0"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    for name in ("metrics.jsonl", "initial-sketch.safetensors", "checkpoints/step-1/weights"):
        (run / name).write_text("...")
    (run / "model.safetensors").write_bytes(bytes(SAMPLE + 1))
    if verdict is not None:
        judged = replace(VERDICT, verdict=verdict)
        write_json(evidence.directory / "report" / "verdict.json", as_json(judged))
    evidence.run(["sh", "-c", f"echo said; {command}"], tmp_path / "archives", time.time() + 2)
    with tarfile.open(tmp_path / "archives" / "smollm2-demo.tar.xz") as packed:
        names = {member.name for member in packed if member.isfile()}
        log = packed.extractfile("demo.log")
        assert log is not None and log.read() == b"said\n"
    report = {"smollm2-demo/report/verdict.json"} if verdict else set[str]()
    of_run = {
        f"smollm2-demo/baseline/seed-0/{one}" for one in ("metrics.jsonl", "initial-sketch.safetensors")
    }
    assert names == {"demo.log"} | of_run | report
    assert evidence.done.exists() == done
