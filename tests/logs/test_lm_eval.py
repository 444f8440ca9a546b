"""Samples of lm-evaluation-harness, as `--log_samples` writes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abrun.errors import StoreError
from abrun.logs import read_logs
from abrun.logs.recorded.selection import ReadingOptions
from abrun.recipe.claims import Claim
from abrun.report.comparing import compare_sources

TIME = "2026-08-21T19-56-54.123456"


def sample(doc_id: int, filter_name: str = "none", **metrics: Any) -> dict[str, Any]:
    return {
        "doc_id": doc_id,
        "doc": {"question": f"What is {doc_id}?", "answer": "#### 1"},
        "target": "1",
        "arguments": {"gen_args_0": {"arg_0": "Q: ...", "arg_1": {"until": ["</s>"], "do_sample": False}}},
        "resps": [["1"]],
        "filtered_resps": ["1"],
        "filter": filter_name,
        "metrics": [*metrics],
        "doc_hash": f"{doc_id:064x}",
        "prompt_hash": "b" * 64,
        "target_hash": "c" * 64,
        **metrics,
    }


def write(folder: Path, task: str, samples: Sequence[dict[str, Any]], time: str = TIME) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"samples_{task}_{time}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in samples))
    (folder / f"results_{time}.json").write_text('{"results": {}}')
    return path


def test_metrics_of_tasks_and_filters_over_documents(tmp_path: Path) -> None:
    rows = [
        sample(doc, name, exact_match=float(doc % 2))
        for doc in (2, 0, 1)
        for name in ("strict-match", "flex")
    ]
    write(tmp_path / "org__model", "gsm8k_cot", rows)
    write(
        tmp_path / "org__model",
        "ifeval",
        [sample(0, strict=True, parts=[True, False]), sample(1, strict=False)],
    )
    (log,) = read_logs(str(tmp_path))
    assert (log.name, log.axis) == ("org__model", "prompts")
    assert {name: series.values.sum() for name, series in log.metrics.items()} == {
        "gsm8k_cot/exact_match,strict-match": 1.0,
        "gsm8k_cot/exact_match,flex": 1.0,
        "ifeval/strict": 1.0,
    }
    assert len(log.metrics["gsm8k_cot/exact_match,flex"]) == 3
    assert log.notes == ("no single number per document, so left out: 'ifeval/parts'",)


def test_the_last_evaluation_of_a_task_counts(tmp_path: Path) -> None:
    write(tmp_path / "m", "rte", [sample(0, acc=1.0)], "2026-08-20T00-00-00.000000")
    write(tmp_path / "m", "rte", [sample(0, acc=0.0)], "2026-08-21T00-00-00.000000")
    (log,) = read_logs(str(tmp_path))
    assert log.metrics["rte/acc"].values.tolist() == [0.0]
    assert log.notes == ("1 older evaluations of the same tasks were left out",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"question": "x"}\n',
            "line 1: no 'doc_id' and 'metrics'; expected a sample of lm-evaluation-harness",
        ),
        (
            '{"doc_id": 0, "metrics": []}\nnonsense\n{}\n',
            "line 2: got 'nonsense'; expected a JSON object",
        ),
    ],
)
def test_other_files_of_that_name_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "rte", [])
    path.write_text(text)
    with pytest.raises(StoreError) as error:
        read_logs(str(tmp_path))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_two_checkpoints_are_paired_by_document(tmp_path: Path) -> None:
    for arm, period in (("hf", 3), ("megatron", 2)):
        rows = [sample(doc, acc=float(doc % period > 0)) for doc in range(300)]
        write(tmp_path / arm / "org__model", "rte", rows)
    sources = [str(tmp_path / arm) for arm in ("hf", "megatron")]
    comparison = compare_sources(sources, ReadingOptions(), claims=[Claim(metric="rte/acc", margin=0.05)])
    (result,) = comparison.content.claims
    assert comparison.verdict == "MISMATCH"
    assert (result.claim.unit, result.claim.num_pairs) == ("prompt", 300)
    assert result.estimate.mean_difference == pytest.approx(1 / 2 - 2 / 3)


def test_documents_that_differ_are_not_paired(tmp_path: Path) -> None:
    for arm, offset in (("hf", 0), ("megatron", 1000)):
        rows = [sample(doc, acc=float(doc % 3 > 0)) | {"doc_hash": f"{doc + offset:x}"} for doc in range(30)]
        write(tmp_path / arm, "rte", rows)
    sources = [str(tmp_path / arm) for arm in ("hf", "megatron")]
    with pytest.raises(Exception, match="no prompt is in every run") as error:
        compare_sources(sources, ReadingOptions(), claims=[Claim(metric="rte/acc", margin=0.05)])
    assert "\n" not in str(error.value)


def write_totals(folder: Path, results: object, time: str = TIME) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"results_{time}.json"
    path.write_text(json.dumps({"results": results, "config": {"random_seed": 0}}, indent=2))
    return path


def test_totals_without_samples_are_final_scores_with_their_standard_errors(tmp_path: Path) -> None:
    gsm8k = {"alias": " - gsm8k", "exact_match,strict": 0.5, "exact_match_stderr,strict": 0.0125}
    ifeval = {"acc,none": 0.75, "acc_stderr,none": "N/A", "acc": True}
    write_totals(tmp_path / "hf/org__model", {"gsm8k": {"exact_match,strict": 0.25}}, "2025-01-01T00-00-00")
    write_totals(tmp_path / "hf/org__model", {"gsm8k": gsm8k, "ifeval": ifeval})
    (log,) = read_logs(str(tmp_path))
    assert (log.name, log.axis) == ("hf/org__model", "final")
    assert {name: series.values.tolist() for name, series in log.metrics.items()} == {
        "gsm8k/exact_match,strict": [0.5],
        "ifeval/acc": [0.75],
    }
    assert "--log_samples" in log.guesses[0] and log.standard_errors == {"gsm8k/exact_match,strict": 0.0125}
    assert log.notes == ("older evaluations left out: 1",)
    write(tmp_path / "hf/org__model", "gsm8k", [sample(0, acc=1.0), sample(1, acc=0.0)])
    assert [log.axis for log in read_logs(str(tmp_path))] == ["prompts"]


def test_one_run_of_each_arm_is_compared_by_the_standard_errors_of_its_totals(tmp_path: Path) -> None:
    for arm, gsm8k, mmlu in (("old", 0.30, 0.50), ("new", 0.35, 0.51)):
        scores = {"gsm8k": (gsm8k, 0.01), "mmlu": (mmlu, 0.012), "code": (gsm8k, "N/A")}
        results = {
            task: {"acc,none": value, "acc_stderr,none": error} for task, (value, error) in scores.items()
        }
        write_totals(tmp_path / arm, results)
    content = compare_sources([str(tmp_path / "old"), str(tmp_path / "new")], ReadingOptions()).content
    described = {row["metric"]: row for row in content.select("description")}
    half_width = 1.6449 * np.hypot(0.01, 0.01)  # z = 3.54
    assert described["gsm8k/acc"]["interval"] == pytest.approx(
        (0.05 - half_width, 0.05 + half_width), abs=1e-4
    )
    assert described["gsm8k/acc"]["p"] == pytest.approx(0.000407, rel=0.01)
    assert described["mmlu/acc"]["p"] == pytest.approx(0.556, rel=0.01)
    assert described["code/acc"]["interval"] is None


@pytest.mark.parametrize("results", [None, [1]])
def test_totals_of_another_program_are_refused(tmp_path: Path, results: object) -> None:
    with pytest.raises(StoreError, match=r"results_.*\.json: no 'results'; expected totals of lm-eval"):
        read_logs(str(write_totals(tmp_path / "a", results)))
