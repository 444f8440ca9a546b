"""`abrun compare --wandb`: a report as an artifact of wandb, its verdict in the summary of a run of its own.

`python -m abrun.wandb_sync.report` does that with a description on its standard input.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.extras import lacking
from abrun.messages import sentence, sentences
from abrun.messages.records import print_reason
from abrun.reasons import Code
from abrun.runs.experiment import is_experiment, open_experiment
from abrun.runs.files import make_private_folder
from abrun.wandb_sync import bounded
from abrun.wandb_sync.wandb_run import INIT_S, line_of

if TYPE_CHECKING:
    from abrun.verdict.verdict_file import VerdictFile

UPLOAD_S = 300.0
JOB_TYPE = "compare"


def upload(verdict: "VerdictFile", files: Sequence[Path], experiment_dir: Path | None) -> str:
    """What to say of it: where the report is, or why it is not there."""
    if missing := lacking("wandb"):
        return f"--wandb: the report was not uploaded: {sentence(missing)}"
    folder = str(files[0].parent.resolve()) if files else os.getcwd()
    name = verdict.experiment
    asked = {
        **_place(experiment_dir),
        "group": name,
        "name": f"{name}-report",
        "id": hashlib.sha256(f"{name}/report/{folder}".encode()).hexdigest()[:16],
        "dir": str(experiment_dir or folder),
        "files": [str(path.resolve()) for path in files],
        "summary": summary_of(verdict),
    }
    code, reasons = bounded.run(["abrun.wandb_sync.report"], UPLOAD_S, said=json.dumps(asked))
    if code == 0 and reasons:
        return sentence(reasons[-1])
    why = f"no answer within {UPLOAD_S:g} s" if code is None else f"exit code {code}"
    return f"--wandb: the report was not uploaded: {sentence(reasons[-1]) if reasons else why}"


def summary_of(verdict: "VerdictFile") -> dict[str, Any]:
    """The verdict as values that wandb can list and sort by."""
    summary: dict[str, Any] = {
        "verdict": verdict.verdict,
        "reasons": "; ".join(sentences(verdict.reasons)),
        "num_pairs": verdict.num_pairs,
    }
    for claim in verdict.claims:
        estimate = claim.estimate
        values = {
            "result": claim.result,
            "mean_difference": estimate.mean_difference,
            "certified_bound": estimate.certified_bound,
        }
        for field, value in values.items():
            if value is not None:
                summary[f"{claim.arm}/{claim.claim.metric}/{field}"] = value
    return summary


def _place(experiment_dir: Path | None) -> dict[str, str | None]:
    """The project of the runs themselves; of others the one that wandb's own variables name."""
    declared: Any = None
    if experiment_dir is not None:
        recipe = open_experiment(experiment_dir).get("recipe")
        declared = recipe.get("wandb") if isinstance(recipe, dict) else None
    if isinstance(declared, dict):
        return {"project": declared.get("project"), "entity": declared.get("entity")}
    return {"project": os.environ.get("WANDB_PROJECT", "abrun"), "entity": os.environ.get("WANDB_ENTITY")}


def main() -> int:
    asked = json.load(sys.stdin)
    try:
        import wandb

        if is_experiment(Path(asked["dir"])):
            os.umask(make_private_folder(Path(asked["dir"]) / "wandb"))
        run = wandb.init(
            project=asked["project"],
            entity=asked["entity"],
            group=asked["group"],
            job_type=JOB_TYPE,
            name=asked["name"],
            id=asked["id"],
            resume="allow",
            dir=asked["dir"],
            settings=wandb.Settings(init_timeout=INIT_S),
        )
        if run.disabled:
            print_reason(Code.WANDB_SWITCHED_OFF())
            return 1
        artifact = wandb.Artifact(asked["name"], type="report", metadata=asked["summary"])
        for path in asked["files"]:
            artifact.add_file(path)
        run.log_artifact(artifact)
        run.summary.update(asked["summary"])
        url, folder = run.url, run.dir
        run.finish()
    except Exception as error:
        print_reason(Code.FOREIGN_TEXT(text=line_of(error)))
        return 1
    print_reason(Code.REPORT_SENT(url=url, folder=Path(folder).parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
