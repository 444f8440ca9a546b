"""`abrun compare --wandb`: a report as a wandb artifact, with its verdict in the summary of a separate run.

`python -m abrun.wandb_sync.report` uploads the report that a JSON request on its standard input describes.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.messages import sentence, sentences
from abrun.messages.codes import in_words
from abrun.messages.records import print_reason
from abrun.recipe.extras import missing_package
from abrun.runs.experiment import is_experiment, open_experiment
from abrun.runs.files import make_private_folder
from abrun.wandb_sync import run_module
from abrun.wandb_sync.wandb_run import INIT_TIMEOUT_S, error_line

if TYPE_CHECKING:
    from abrun.verdict.verdict_file import VerdictFile

UPLOAD_TIMEOUT_S = 300.0
JOB_TYPE = "compare"


def upload_report(verdict: "VerdictFile", files: Sequence[Path], experiment_dir: Path | None) -> str:
    """Upload a report and return a sentence: where it is, or why it was not uploaded."""
    if missing := missing_package("wandb"):
        return f"--wandb: the report was not uploaded: {missing}"
    folder = str(files[0].parent.resolve()) if files else os.getcwd()
    name = verdict.experiment
    request = {
        **_find_project(experiment_dir),
        "group": name,
        "name": f"{name}-report",
        "id": hashlib.sha256(f"{name}/report/{folder}".encode()).hexdigest()[:16],
        "dir": str(experiment_dir or folder),
        "files": [str(path.resolve()) for path in files],
        "summary": summarize_verdict(verdict),
    }
    module, text = ["abrun.wandb_sync.report"], json.dumps(request)
    code, reasons = run_module(module, UPLOAD_TIMEOUT_S, stdin_text=text)
    if code == 0 and reasons:
        return sentence(reasons[-1])
    cause = f"no answer within {UPLOAD_TIMEOUT_S:g} s" if code is None else f"exit code {code}"
    return f"--wandb: the report was not uploaded: {sentence(reasons[-1]) if reasons else cause}"


def summarize_verdict(verdict: "VerdictFile") -> dict[str, Any]:
    """Return the verdict as values that wandb can list and sort."""
    summary: dict[str, Any] = {
        "verdict": verdict.verdict,
        "reasons": "; ".join(sentences(verdict.reasons)),
        "num_pairs": verdict.num_pairs,
    }
    for claim in verdict.claims:
        estimate = claim.estimate
        values = {"result": claim.result, "mean_difference": estimate.mean_difference}
        for field, value in {**values, "certified_bound": estimate.certified_bound}.items():
            if value is not None:
                summary[f"{claim.arm}/{claim.claim.metric}/{field}"] = value
    return summary


def _find_project(experiment_dir: Path | None) -> dict[str, str | None]:
    """Return the wandb project of the experiment's runs, or else the one that the environment names."""
    declared: Any = None
    if experiment_dir is not None:
        recipe = open_experiment(experiment_dir).get("recipe")
        declared = recipe.get("wandb") if isinstance(recipe, dict) else None
    if isinstance(declared, dict):
        return {"project": declared.get("project"), "entity": declared.get("entity")}
    return {"project": os.environ.get("WANDB_PROJECT", "abrun"), "entity": os.environ.get("WANDB_ENTITY")}


def main() -> int:
    request = json.load(sys.stdin)
    try:
        import wandb

        if is_experiment(Path(request["dir"])):
            os.umask(make_private_folder(Path(request["dir"]) / "wandb"))
        named = {key: request[key] for key in ("project", "entity", "group", "name", "id", "dir")}
        settings = wandb.Settings(init_timeout=INIT_TIMEOUT_S)
        run = wandb.init(**named, job_type=JOB_TYPE, resume="allow", settings=settings)
        if run.disabled:
            print_reason(in_words("wandb is disabled here (WANDB_MODE=disabled?)"))
            return 1
        artifact = wandb.Artifact(request["name"], type="report", metadata=request["summary"])
        for path in request["files"]:
            artifact.add_file(path)
        run.log_artifact(artifact)
        run.summary.update(request["summary"])
        url, folder = run.url, run.dir
        run.finish()
    except Exception as error:
        print_reason(in_words(error_line(error)))
        return 1
    place = url or f"offline in {Path(folder).parent}; upload it with wandb sync"
    print_reason(in_words(f"The report is in wandb: {place}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
