"""The run store: the only package that knows the layout of `runs/`.

    runs/<experiment>/experiment.json         resolved recipe, planned runs, hash of the compare block
    runs/<experiment>/reference.json          a copy of the frozen ensemble that the recipe names, if any
    runs/<experiment>/launcher.lock           who launches it now
    runs/<experiment>/git-<hash>.diff         uncommitted changes of its code (record_diff)
    runs/<experiment>/<arm>/seed-<k>[-aa<j>]/
        config.json       {experiment, arm, seed, rerun,             written by the launcher, once
                           initial_weights, config: resolved}
        launch.json       commit; process, devices, exit code of  written by the launcher
                           every start, and how it saw it end
        attempts/0001.json  one start of the job: its process,       written by that job alone
                           status, and how it says that it ended
        environment.json  versions, devices, precision; hashes of    written by the job, at every start
                           prompts and initial weights
        heartbeat.json    step, time, pid                            written by the job, every step
        nodes/0000.json   whether the ranks of a node give signs,    written by the node's agent, every 15 s
                           and where they are if they do not
        nodes/ending-*.json  how a node's part of the run ended      written by the node's agent, last
        result.json       the run is finished                        written by the job, last
        metrics.jsonl     one line a step                            appended by the job
        events.jsonl      started, resumed, checkpoint, failed, ...  appended by the job
        validation.jsonl  one line a validation, prompt by prompt    appended by the job
        samples.jsonl     some completions of some steps             appended by the job
        stdout.log, checkpoints/
    runs/warm-starts/<hash>/                  a run directory too: steps shared by all arms and seeds

One writer per file. Everything is a temporary file and a rename, or one append a line, so that a reader on
any host of a shared file system, at any moment, sees whole files and at most one torn last line. Lines are on
the disk before the checkpoint or result.json that builds on them, files before the names they get. The last
key of a line, `crc32`, is a checksum of what stands before it.
"""

from abrun.runs.access import PUBLIC, UnreadableError, is_allowed, read_error, share_new_folder, unreadable
from abrun.runs.experiment import (
    EXPERIMENT,
    REFERENCE,
    WARM_STARTS,
    can_fork,
    closed_folders,
    experiments_in,
    find_experiment,
    is_experiment,
    metrics_of,
    open_experiment,
    planned_runs,
    run_dir,
    run_state,
    warm_start_states,
    write_diff,
    write_experiment,
)
from abrun.runs.files import (
    damage,
    decode,
    encode,
    explained,
    fingerprint,
    leftovers,
    make_folder,
    make_private_folder,
    open_log,
    read_as,
    read_json,
    read_json_or_empty,
    readable,
    remove_leftovers,
    share_written,
    sync_file,
    sync_folder,
    write_file,
    write_json,
)
from abrun.runs.lines import NOT_METRICS, LineReader, LineWriter, read_lines
from abrun.runs.lock import (
    LOCK,
    Lease,
    Locked,
    TakenOverError,
    file_lock,
    folder_lock,
    launcher_lock,
    launcher_of,
    owner_of,
)
from abrun.runs.records import (
    NODE_EVERY_S,
    NODE_LOST_S,
    Attempt,
    Environment,
    Git,
    Launch,
    Node,
    RunRecord,
    RunState,
    SilentRank,
    Status,
    TextValues,
    code_name,
    started_after,
)
from abrun.runs.rundir import SCHEMA_VERSION, RunDir
from abrun.runs.samples import Sample
from abrun.runs.saved import STATE as SAVED_STATE
from abrun.runs.saved import SavedState, saved_state
from abrun.runs.schemas import Count, Flag, Items, Seconds, Texts, checked
from abrun.runs.writer import FencedError, RunWriter

__all__ = [
    "EXPERIMENT",
    "LOCK",
    "NODE_EVERY_S",
    "NODE_LOST_S",
    "NOT_METRICS",
    "PUBLIC",
    "REFERENCE",
    "SAVED_STATE",
    "SCHEMA_VERSION",
    "WARM_STARTS",
    "Attempt",
    "Count",
    "Environment",
    "FencedError",
    "Flag",
    "Git",
    "Items",
    "Launch",
    "Lease",
    "LineReader",
    "LineWriter",
    "Locked",
    "Node",
    "RunDir",
    "RunRecord",
    "RunState",
    "RunWriter",
    "Sample",
    "SavedState",
    "Seconds",
    "SilentRank",
    "Status",
    "TakenOverError",
    "TextValues",
    "Texts",
    "UnreadableError",
    "can_fork",
    "checked",
    "closed_folders",
    "code_name",
    "damage",
    "decode",
    "encode",
    "experiments_in",
    "explained",
    "file_lock",
    "find_experiment",
    "fingerprint",
    "folder_lock",
    "is_allowed",
    "is_experiment",
    "launcher_lock",
    "launcher_of",
    "leftovers",
    "make_folder",
    "make_private_folder",
    "metrics_of",
    "open_experiment",
    "open_log",
    "owner_of",
    "planned_runs",
    "read_as",
    "read_error",
    "read_json",
    "read_json_or_empty",
    "read_lines",
    "readable",
    "remove_leftovers",
    "run_dir",
    "run_state",
    "saved_state",
    "share_new_folder",
    "share_written",
    "started_after",
    "sync_file",
    "sync_folder",
    "unreadable",
    "warm_start_states",
    "write_diff",
    "write_experiment",
    "write_file",
    "write_json",
]
