"""Sentences of refusals of run directories and files that cannot be read, written or trusted."""

from abrun.messages.message import Message
from abrun.reasons import Code


def _denied(path: str, owner: str | None, fix: str | None) -> str:
    """Without an owner the path is the user's own."""
    problem = f"{path}: cannot be read: Permission denied"
    if fix is None:
        return f"{problem}; ask its owner to share it"
    if owner is None:
        return f"{problem}; allow it with: {fix}"
    group = " (GROUP: one that you are in)" if fix.startswith("chgrp") else ""
    return f"{problem}; ask its owner {owner} for: {fix}{group}"


MESSAGES = {
    Code.PERMISSION_DENIED: Message(_denied, meaning="this user may not read a file or folder"),
    Code.PATH_UNREADABLE: Message("{path}: cannot be read: {error}"),
    Code.EXPERIMENT_FILE_NOT_A_FILE: Message("{path}: not a file: restore it"),
    Code.NO_EXPERIMENT: Message("{directory}: no experiment here", remedy="{nearby}"),
    Code.EXPERIMENT_LACKS_RUNS: Message("{path}: runs: missing", remedy="restore the file, or launch again"),
    Code.FILE_IN_PLACE_OF_FOLDER: Message("{path}: a file is where a folder has to be: move it away"),
    Code.LINK_IN_PLACE_OF_FILE: Message("{path}: a symbolic link is where a file has to be: remove the link"),
    Code.FILE_MISSING: Message("{path}: no such file", remedy="is this a run directory of abrun?"),
    Code.NOT_JSON: Message("{path}: not readable as JSON: {error}"),
    Code.JSON_NOT_AN_OBJECT: Message("{path}: got {type}", remedy="a JSON object is expected"),
    Code.JSON_TOO_DEEP: Message("{path}: got {got}, nested more than {max_depth} deep: restore it"),
    Code.NOT_A_FILE: Message("{path}: not a file: move it away"),
    Code.UNWRITABLE: Message(
        "{path}: cannot be written: {error}", remedy="free the space or choose another --runs-dir"
    ),
    Code.LINE_INVALID: Message(
        "{path}, {place}: got {got:repr}", remedy="{problem}: remove the line or run again"
    ),
    Code.METRICS_LINE_INVALID: Message("{path}, line {line}: {problem}"),
    Code.VALIDATION_LINE_INVALID: Message(
        "{path}, line {line}: not a validation ({type}: {error})", remedy="remove the line or run again"
    ),
    Code.SCHEMA_VERSION_UNKNOWN: Message(
        "{path}: schema_version: got {got}", remedy="this abrun reads {supported}: use the one that wrote it"
    ),
    Code.RUN_RECORD_INCOMPLETE: Message(
        "{path}: does not say arm, seed, rerun and config", remedy="launch the run again"
    ),
    Code.SAMPLES_LINE_INVALID: Message(
        "{path}, line {line}: not a row of samples ({field}: {problem})",
        remedy="remove the line or run again",
    ),
    Code.STATE_MISSING: Message("{file} no such file"),
    Code.STATE_LACKS_RANKS: Message("{file} files: got {files} for {ranks} ranks"),
    Code.RECORD_FIELD_INVALID: Message("{path}: {field}: {problem}: restore the file, or remove it"),
    Code.RECORDS_LOST: Message(
        "{path}: {problem}: continue with --resume, which records the lost steps again"
    ),
    Code.RUN_IS_EXPERIMENT: Message("{run}: got an experiment; name one of its runs: {names:list}{more}"),
    Code.SYNC_NEEDS_SECTION: Message(
        "{directory}: no run of it has a section wandb", remedy="set wandb in the recipe"
    ),
    Code.RUNS_NOT_SENT: Message("wandb: {failed} of {runs} runs were not sent: {first}"),
    Code.STEPS_SENT: Message(
        lambda steps, url: f"{steps} step{'' if steps == 1 else 's'} sent{f', {url}' if url else ''}",
        meaning="what wandb lacked of a run was sent",
    ),
    Code.MIRROR_NOT_BEGUN: Message(
        lambda error, offline: (
            f"{error} This run {'is mirrored offline' if offline else 'goes on without a mirror'}."
        ),
        meaning="wandb does not begin a run's mirror",
    ),
    Code.MIRROR_STOPPED: Message("stopped mirroring: {error}"),
    Code.MIRROR_NOT_ENDED: Message("did not finish: {error}"),
    Code.REPORT_SENT: Message(
        lambda url, folder: f"The report is in wandb: {url or f'offline in {folder}; wandb sync sends it'}",
        meaning="a report was uploaded, or recorded offline",
    ),
    Code.WANDB_SWITCHED_OFF: Message("wandb is switched off here, as by WANDB_MODE=disabled"),
    Code.LOG_OF_ARM: Message("{directory}: an arm of {parent}", remedy="give one of its runs: {runs}"),
    Code.NO_RUN_OR_EXPERIMENT: Message(
        "{directory}: no run and no experiment is here, nor under --runs-dir",
        remedy="give a folder, or a name such as EXPERIMENT/ARM/seed-0 (abrun status lists experiments, "
        "abrun logs EXPERIMENT its runs)",
    ),
    Code.RUNS_DIR_MISSING: Message(
        "{runs_dir}: no such folder", remedy="launch a recipe first, or give another --runs-dir"
    ),
}
