"""Sentences on how processes end, why runs fail or are stopped, and where they hang."""

from collections.abc import Mapping

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import listed

GIB = 2**30
OUT_OF_MEMORY = (
    ": the machine, not a GPU, ran out of memory; run fewer jobs at once (--jobs), ask Slurm for more "
    "(launcher.sbatch.mem), or use smaller batches"
)


def _ranks_lost(waited_s: float | None, doing: str, error: str) -> str:
    waited = "timed out" if waited_s is None else f"timed out after {waited_s:g} s"
    return (
        f"waiting for other ranks {waited}, in a collective during {doing or 'the start'}: they ended, hang, "
        f"or cannot be reached ({error})"
    )


def _memory_ran_out(
    on_gpu: bool, doing: str, others: Mapping[str, int] | None, error: str, runs_per_gpu: int = 1
) -> str:
    remedy = (
        "use a smaller policy.micro_batch_size (with packing: micro_batch_tokens), or find what takes the "
        "memory: abrun memory-profile RECIPE"
    )
    if others:
        remedy = (
            f"other processes hold {others['other_bytes'] / GIB:.1f} of its "
            f"{others['total_bytes'] / GIB:.1f} GiB, this one {others['own_bytes'] / GIB:.1f}: run fewer "
            "jobs at once (--jobs), or end the other processes on that GPU"
        )
    if runs_per_gpu > 1:
        remedy = f"use a smaller cluster.runs_per_gpu, or {remedy.removeprefix('use ')}"
    share = f"a run's share of a GPU (cluster.runs_per_gpu: {runs_per_gpu})"
    device = "the machine" if not on_gpu else "a GPU" if runs_per_gpu == 1 else share
    return f"{device} ran out of memory during {doing or 'the start'}; {remedy} ({error})"


def _ranks_silent(silent_s, ranks, num_unstarted, num_more) -> str:
    """No rank makes progress; `ranks` has the positions of at most four."""
    places = [
        f"rank {rank['rank']}{' (on {})'.format(rank['host']) if rank['host'] else ''} in {rank['place']} "
        f"during {rank['doing']}"
        for rank in ranks
    ]
    places += [f"{num_unstarted} rank(s) that never started"] if num_unstarted else []
    places += [f"and {num_more} more"] if num_more else []
    return f"no progress for {silent_s:.0f} s: {'; '.join(places)}"


def _alias_not_logged(name, metric, num_steps, logged, num_more, close) -> str:
    names = ", ".join(logged) + ", ..." * bool(num_more)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"trainer.aliases: {name}: no metric {metric!r} in {num_steps} logged steps; logged: {names}{hint}"


MESSAGES: dict[Code, Message] = {
    Code.FOREIGN_TEXT: "{text}",
    Code.EXIT_CODE: "exit code {exit_code}{last_line:if  ({last_line})}",
    Code.KILLED: "killed by {signal}",
    Code.OUT_OF_MEMORY_KILLED: "{signal:if killed by {signal}|exit code {exit_code}}" + OUT_OF_MEMORY,
    Code.SEE_LOG: "{ending}; see {log}",
    Code.SEVERAL_ERRORS: "{errors:join ; }{out_of_memory:if " + OUT_OF_MEMORY + "}",
    Code.RANK_FAILED: "rank {rank} of {num_ranks}{host:if  (on {host})}: {cause}",
    Code.NODE_FAILED: "node {node} ({host}): {cause}",
    Code.EXCEPTION: "{kind:if {kind}: }{error}{origin:if  (from {origin})}",
    Code.RANKS_LOST: _ranks_lost,
    Code.RANKS_NOT_FOUND: "rank {rank} cannot reach all other ranks at {address}: {error}",
    Code.COLLECTIVE_TIMED_OUT: "waiting for other ranks timed out after {waited_s:.0f} s, in an NCCL "
    "collective ({work})",
    Code.MEMORY_RAN_OUT: _memory_ran_out,
    Code.NODE_LOST: "{node} is lost: {error}",
    Code.TIME_LIMIT_REACHED: "limits.run_s: not finished after {limit_s:g} s",
    Code.START_LIMIT_REACHED: "limits.start_s: no step within {limit_s:g} s of the start",
    Code.STALL_LIMIT_REACHED: "limits.stalled_s: {silence}",
    Code.RANKS_SILENT: _ranks_silent,
    Code.NODES_SILENT: lambda nodes, silent_s: (
        f"no report from {listed('node {node} ({host})'.format_map(node) for node in nodes)} for "
        f"{silent_s:.0f} s"
    ),
    Code.NO_NEW_STEP: "no step after step {step} for {silent_s:.0f} s",
    Code.NO_SIGN_OF_LIFE: "no progress for {silent_s:.0f} s",
    Code.STOPPED_BY_SIGNAL: "stopped by a signal; continue with --resume",
    Code.ALIAS_NOT_LOGGED: _alias_not_logged,
}
