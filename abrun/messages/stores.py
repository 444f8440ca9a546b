"""Sentences of refusals of run directories and files that cannot be read, written or trusted."""

from abrun.messages.codes import Code
from abrun.messages.message import Message


def _denied(path: str, owner: str | None, fix: str | None) -> str:
    """This user may not read a path; without an `owner` it belongs to the user."""
    problem = f"{path}: cannot be read: Permission denied"
    if fix is None:
        return f"{problem}; ask its owner to share it"
    if owner is None:
        return f"{problem}; allow it with: {fix}"
    group = " (GROUP: one that you are in)" if fix.startswith("chgrp") else ""
    return f"{problem}; ask its owner {owner} for: {fix}{group}"


MESSAGES: dict[Code, Message] = {
    Code.PERMISSION_DENIED: _denied,
    Code.EXPERIMENT_FILE_NOT_A_FILE: "{path}: not a file; restore it",
    Code.EXPERIMENT_LACKS_RUNS: "{path}: runs: missing; restore the file, or launch again",
    Code.FILE_IN_PLACE_OF_FOLDER: "{path}: is a file, but has to be a folder; move it away",
    Code.LINK_IN_PLACE_OF_FILE: "{path}: is a symbolic link, but has to be a file; remove the link",
    Code.JSON_NOT_AN_OBJECT: "{path}: got {type}; allowed: a JSON object",
    Code.JSON_TOO_DEEP: "{path}: got {got}, nested more than {max_depth} levels deep; restore it",
    Code.NOT_A_FILE: "{path}: not a file; move it away",
    Code.UNWRITABLE: "{path}: cannot be written: {error}; free some space, or choose another --runs-dir",
    Code.LINE_INVALID: "{path}, {place}: got {got:repr}: {problem}; remove the line, or run again",
    Code.METRICS_LINE_INVALID: "{path}, line {line}: {problem}",
    Code.VALIDATION_LINE_INVALID: "{path}, line {line}: not a validation record ({type}: {error}); remove "
    "the line, or run again",
    Code.SCHEMA_VERSION_UNKNOWN: "{path}: schema_version is {got}, but this abrun reads {supported}; use the "
    "version that wrote it",
    Code.RUN_RECORD_INCOMPLETE: "{path}: lacks arm, seed, rerun or config; launch the run again",
    Code.SAMPLES_LINE_INVALID: "{path}, line {line}: not a row of samples ({field}: {problem}); remove the "
    "line, or run again",
    Code.STATE_MISSING: "{file}: no such file",
    Code.STATE_LACKS_RANKS: "{file}: lists {files} files for {ranks} ranks",
    Code.RECORD_FIELD_INVALID: "{path}: {field}: {problem}; restore the file, or remove it",
    Code.RECORDS_LOST: "{path}: {problem}; continue with --resume, which records the lost steps again",
    Code.RUN_IS_EXPERIMENT: "{run}: is an experiment; name one of its runs: {names:list}{more}",
    Code.SYNC_NEEDS_SECTION: "{directory}: none of its runs uses wandb; set wandb in the recipe",
    Code.RUNS_NOT_SENT: "wandb: {failed} of {runs} runs were not uploaded: {first}",
    Code.NO_RUN_OR_EXPERIMENT: "{directory}: no such run or experiment, here or in --runs-dir; give a "
    "folder, or a name such as EXPERIMENT/ARM/seed-0 (abrun status lists experiments, abrun status "
    "EXPERIMENT its runs)",
    Code.RUNS_DIR_MISSING: "{runs_dir}: no such folder; launch a recipe first, or give another --runs-dir",
    Code.STEPS_SENT: "{steps:count step} uploaded{url:if , {url}}",
    Code.MIRROR_NOT_BEGUN: "{error} This run {offline:if logs to wandb offline|continues without wandb}.",
    Code.MIRROR_STOPPED: "wandb stopped: {error}",
    Code.MIRROR_NOT_ENDED: "did not finish: {error}",
    Code.REPORT_SENT: "The report is in wandb: {url:if {url}|offline in {folder}; upload it with wandb sync}",
    Code.WANDB_SWITCHED_OFF: "wandb is disabled here (WANDB_MODE=disabled?)",
}
