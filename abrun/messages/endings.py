"""Sentences about endings: how a process ended, why a run failed or was stopped, where a run hangs."""

from collections.abc import Mapping, Sequence
from typing import Any

from abrun.messages.message import Message
from abrun.reasons import Code

GIB = 2**30
OUT_OF_MEMORY = (
    ", when memory ran out (the machine's, not a GPU's): run fewer at once (--jobs), ask Slurm for more "
    "(launcher.sbatch.mem), or use smaller batches"
)


def _exit_code(exit_code: int, last_line: str | None) -> str:
    return f"exit code {exit_code}{f' ({last_line})' if last_line else ''}"


def _out_of_memory_killed(signal: str | None, exit_code: int | None) -> str:
    return f"{f'killed by {signal}' if signal else f'exit code {exit_code}'}{OUT_OF_MEMORY}"


def _several_errors(errors: Sequence[str], out_of_memory: bool) -> str:
    return f"{'; '.join(errors)}{OUT_OF_MEMORY if out_of_memory else ''}"


def _rank_failed(rank: int, num_ranks: int, host: str | None, cause: str) -> str:
    return f"rank {rank} of {num_ranks}{f' (on {host})' if host else ''}: {cause}"


def _exception(kind: str | None, error: str, origin: str | None) -> str:
    return f"{f'{kind}: ' if kind else ''}{error}{f' (from {origin})' if origin else ''}"


def _ranks_lost(waited_s: float | None, doing: str, error: str) -> str:
    waited = "" if waited_s is None else f" for {waited_s:g} s"
    return (
        f"waited in vain{waited} for other ranks, in a collective during {doing or 'the start'}: "
        f"they ended, hang, or cannot be reached ({error})"
    )


def _memory_ran_out(on_gpu: bool, doing: str, others: Mapping[str, int] | None, error: str) -> str:
    cure = (
        "use a smaller policy.micro_batch_size (with packing: micro_batch_tokens), or see what takes how "
        "much with: abrun memory-profile RECIPE"
    )
    if others:
        cure = (
            f"other processes hold {others['other_bytes'] / GIB:.1f} of its "
            f"{others['total_bytes'] / GIB:.1f} GiB, this one {others['own_bytes'] / GIB:.1f}: run fewer at "
            "once (--jobs), or end what else is on that GPU"
        )
    whose = "a GPU" if on_gpu else "the machine"
    return f"{whose} ran out of memory during {doing or 'the start'}: {cure} ({error})"


def _ranks_silent(
    silent_s: float, ranks: Sequence[Mapping[str, Any]], num_unstarted: int, num_more: int
) -> str:
    words = [
        f"rank {rank['rank']}{' (on {})'.format(rank['host']) if rank['host'] else ''} in {rank['place']} "
        f"during {rank['doing']}"
        for rank in ranks
    ]
    words += [f"{num_unstarted} rank(s) that never came to their first line"] if num_unstarted else []
    words += [f"and {num_more} more"] if num_more else []
    return f"no sign of life for {silent_s:.0f} s: {'; '.join(words)}"


def _nodes_silent(nodes: Sequence[Mapping[str, Any]], silent_s: float) -> str:
    names = ", ".join(f"node {node['node']} ({node['host']})" for node in nodes)
    return f"no sign of life of {names} for {silent_s:.0f} s"


def _alias_not_logged(
    name: str, metric: str, num_steps: int, logged: Sequence[str], num_more: int, close: str | None
) -> str:
    shown = ", ".join(logged) + ", ..." * bool(num_more)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"trainer.aliases: {name}: no metric {metric!r} in {num_steps} logged steps; logged: {shown}{hint}"


def _no_metrics(format: str, path: str, problem: str | None, notes: Sequence[str], log: str) -> str:
    why = problem or "; ".join(notes) or "it holds no numbers"
    return f"no metrics: trainer.metrics: {format} at {path}: {why}; mend format or path, or look into {log}"


def _job_ended(job: str, state: str) -> str:
    return f"job {job} ended: {state}{OUT_OF_MEMORY if state == 'OUT_OF_MEMORY' else ''}"


def _launched_by_another(path: str, owner: str, pid: int | None, may_take_over: bool) -> str:
    how = "stop it there" if pid is None else f"stop it with: kill {pid}"
    instead = ", or claim its place with --take-over" if may_take_over else ""
    return f"{path}: {owner} launches this; wait for it, {how}{instead}"


def _lock_taken_over(owner: str, is_gone: bool, as_asked: bool) -> str:
    why = "which is gone" if is_gone else "as asked" if as_asked else "which shows no life"
    return f"took over the lock of {owner}, {why}"


MESSAGES = {
    Code.FOREIGN_TEXT: Message("{text}"),
    Code.EXIT_CODE: Message(_exit_code, meaning="exit code N, with the last line that the process printed"),
    Code.KILLED: Message("killed by {signal}"),
    Code.OUT_OF_MEMORY_KILLED: Message(
        _out_of_memory_killed, meaning="the kernel killed the process because the machine ran out of memory"
    ),
    Code.ENDED_WITHOUT_RESULT: Message("ended without a result"),
    Code.SEE_LOG: Message("{ending}", remedy="see {log}"),
    Code.SEVERAL_ERRORS: Message(
        _several_errors, meaning="the errors that agents printed; also whether Slurm says memory ran out"
    ),
    Code.RANK_FAILED: Message(_rank_failed, meaning="a rank failed; its cause is a reason"),
    Code.EXCEPTION: Message(_exception, meaning="an exception ended a rank"),
    Code.RANKS_LOST: Message(
        _ranks_lost, meaning="a collective failed because other ranks ended, hang, or cannot be reached"
    ),
    Code.RANKS_NOT_FOUND: Message("rank {rank} does not find all others at {address}: {error}"),
    Code.COLLECTIVE_TIMED_OUT: Message(
        "waited in vain for {waited_s:.0f} s for other ranks, in a collective of NCCL ({work})"
    ),
    Code.MEMORY_RAN_OUT: Message(_memory_ran_out, meaning="a GPU, or the machine, ran out of memory"),
    Code.NODE_LOST: Message("{node} is lost: {error}"),
    Code.JOB_WAITS: Message("job {job} waits: {why}"),
    Code.RUN_WAITS: Message("job {job} waits {why}"),
    Code.JOB_STATE: Message("job {job} is {state}: {message}"),
    Code.JOB_BEGINS_OR_ENDS: Message("job {job} begins or ends on {nodes}"),
    Code.JOB_ENDED: Message(_job_ended, meaning="the cluster says that a job ended in this state"),
    Code.JOB_LEFT_NOTHING: Message(
        "{ending}, and left no word in {directory}: do the nodes share it? Look into {folder}, and ask: "
        "scontrol show job {job}"
    ),
    Code.JOB_RUN_SILENT: Message("{ending}, and its run left no word, as on a full disk"),
    Code.JOB_CANCELLED: Message("job {job} was cancelled while it waited", remedy="continue with --resume"),
    Code.JOB_STOPPED: Message("job {job} was stopped", remedy="continue with --resume"),
    Code.JOB_NOT_IN_QUEUE: Message("job {job} is no longer in Slurm's queue"),
    Code.JOB_UNKNOWN: Message(
        "job {job} is no longer known at {url}, as when a head has been restarted",
        remedy="continue with --resume",
    ),
    Code.RESUMABLE: Message("{ending}", remedy="continue with --resume"),
    Code.RUN_REMOVED: Message(
        "{directory}: was removed while job {job} runs", remedy="--resume makes it anew"
    ),
    Code.ATTEMPT_REMOVED: Message("{path}: was removed; attempt {attempt} stops"),
    Code.ATTEMPT_FENCED: Message("{path}: attempt {newest} owns this run now; attempt {attempt} stops"),
    Code.LAUNCHED_BY_ANOTHER: Message(
        _launched_by_another, meaning="another launcher, which lives, owns the directory"
    ),
    Code.FILE_LOCKED: Message("{path}: another process changes it: {problem}"),
    Code.FOLDER_LOCKED: Message(
        "{folder}: another {command} is at work there", remedy="wait for it, or give another --output"
    ),
    Code.LAUNCHER_BEGINS: Message("{path}: another launcher begins here just now"),
    Code.LAUNCHER_FASTER: Message("{path}: another launcher was faster"),
    Code.LOCK_TAKEN_OVER: Message(
        _lock_taken_over, meaning="the lock of a launcher that is gone or silent, or as asked, was taken over"
    ),
    Code.TAKEN_OVER: Message("{path}: {owner} has taken this over; this one stops its runs"),
    Code.NO_TEMPORARY_FILES: Message(
        "temporary files: {error}", remedy="free some space there, or set TMPDIR"
    ),
    Code.RANKS_NOT_STARTED: Message("node {node} cannot start its ranks: {error}"),
    Code.TIME_LIMIT_REACHED: Message("limits.run_s: not finished after {limit_s:g} s"),
    Code.STALL_LIMIT_REACHED: Message("limits.stalled_s: {silence}"),
    Code.RANKS_SILENT: Message(
        _ranks_silent, meaning="no sign of life of any rank, and where each is (at most four)"
    ),
    Code.NODES_SILENT: Message(_nodes_silent, meaning="no sign of life of the agents of these nodes"),
    Code.NO_NEW_STEP: Message("no step after step {step} for {silent_s:.0f} s"),
    Code.NO_SIGN_OF_LIFE: Message("no sign of life for {silent_s:.0f} s"),
    Code.STOPPED_BY_SIGNAL: Message("stopped by a signal", remedy="continue with --resume"),
    Code.LAUNCHER_GONE: Message(
        "it and its launcher are gone and left no word, as after a kill", remedy="continue with --resume"
    ),
    Code.PROCESS_GONE: Message("its process is gone and left no word, as on a full disk"),
    Code.RECORD_DAMAGED: Message("its record was damaged: how it ended is not known"),
    Code.NOT_STARTED: Message("not started: {cause}: {ending}"),
    Code.WARM_START_FAILED: Message("the warm start in {directory} {status}"),
    Code.FAILED_ALIKE: Message("{run} and {num_more} more, of several seeds, failed alike at their start"),
    Code.RUN_DIRECTORY_GONE: Message("{directory} is gone"),
    Code.COMMAND_NOT_STARTED: Message(
        "trainer.argv: got {command:repr}, which cannot be started: {error}",
        remedy="give the path of an executable file",
    ),
    Code.ALIAS_NOT_LOGGED: Message(
        _alias_not_logged, meaning="an alias names a metric that the log lacks after some steps"
    ),
    Code.NO_METRICS: Message(
        _no_metrics,
        meaning="a command ended and its log holds no metrics",
    ),
    Code.METRICS_UNREADABLE: Message("metrics: {problem}"),
    Code.METRICS_LEAD_TO_RUN_FILE: Message("{path}: leads to a file of abrun's: {target}"),
    Code.METRICS_LOST_ROWS: Message(
        "{path}: lost its rows up to step {step} while the command ran: train again with --resume, without "
        "the trainer's checkpoints if it would go on from them"
    ),
}
