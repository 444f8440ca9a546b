"""Sentences of refusals to launch, continue or cancel runs."""

from abrun.messages.message import Message
from abrun.reasons import Code


def _problems(recipe: str, problems: list[str], shown_by_dry_run: bool) -> str:
    """Checks before the launch have found these problems."""
    shown = ": --dry-run shows them" if shown_by_dry_run else ""
    more = f" (and {len(problems) - 1} more{shown})" if len(problems) > 1 else ""
    return f"{recipe}: {problems[0]}{more}"


MESSAGES: dict[Code, Message] = {
    Code.SYNC_NEEDS_PACKAGE: "{directory}: sync {problem}",
    Code.NOT_MEASURED_HERE: "cluster: got {nodes} node(s) x {gpus_per_node} GPU(s){engines:if  and "
    "rollout.devices {engines}}, and this machine has {machine}; it is measured here: use --set "
    "cluster.gpus_per_node=...",
    Code.PLAN_CANNOT_RUN: _problems,
    Code.NODE_CANNOT_RUN: "{host}: {problem}",
    Code.JOBS_LEFT_IN_QUEUE: "{error}; jobs submitted before that ({jobs:list}) are still in the queue "
    "({problem}): end them with: abrun cancel {directory}",
    Code.SLURM_REFUSES_JOB: "slurm: {answer} (asked for: {options})",
    Code.LAUNCHED_ELSEWHERE: "{directory}: {owner} launches it; cancel it there",
    Code.LAUNCHER_UNREACHABLE: "{directory}: {owner} launches it and cannot be asked: {error}",
    Code.FAULTS_NEED_ABRUN_TRAINER: "{recipe}: arms.baseline: got a foreign trainer, in which no fault is "
    "injected",
    Code.FAULT_NEEDS: "--faults: got {fault:repr}, which {needs}; give it by --set, or drop it here",
    Code.NO_FAULT_FITS: "{recipe}: got no fault that it can inject; see: abrun faults",
    Code.LAUNCHER_EXPORTS_ONLY: "launcher.type: got {launcher:repr}, for which abrun writes manifests and "
    "starts nothing: use abrun export RECIPE --to {launcher}, or --launcher local, slurm or ray",
    Code.EXPERIMENT_NAME_INVALID: "--name: got {got:repr}; allowed: letters, digits, '.', '_' and '-', at "
    "most 100, and not {reserved:repr}",
    Code.EXPERIMENT_EXISTS: "{directory}: an experiment is here already, {finished} of {runs} runs "
    "finished; continue it with --resume, or give this one another --name",
    Code.DIRECTORY_IN_USE: "{directory}: not empty, and no experiment of abrun; choose another --name",
    Code.JOBS_QUEUED: "{directory}: --resume: jobs of it are in the queue ({jobs:list}): wait for them, or "
    "end them with: abrun cancel {directory}",
    Code.RESUME_LACKS_RUN: "{directory}: --resume: the recipe has no run {run}, which is here; runs can be "
    "added, not dropped: restore arms, seeds and aa_reruns, or choose another --name",
    Code.RESUME_OTHER_RECIPE: "{directory}: --resume: the run directory of another experiment: "
    "{difference}; restore the recipe, or give this one another --name",
    Code.RESUME_OTHER_WARM_START: "{directory}: --resume: {run} would start from the warm start "
    "{warm_start}, and the runs of its arm that are here started from {recorded}, which this version makes "
    "otherwise: resume with the abrun that launched them, or give another --name",
    Code.EXPORT_FOLDER_IN_USE: "{folder}: is here already, and not an empty folder; remove it, or choose "
    "another -o",
    Code.EXPORT_FOLDER_UNWRITABLE: "{folder}: cannot be written: {error}; choose another -o",
    Code.EXPORT_WITHOUT_RUN: "{run}: no run of the recipe {recipe}; export it again",
    Code.WARM_START_NOT_MADE: "{run}: starts from {path}, which is not there yet: submit the warm start "
    "first",
    Code.EXPORT_RECIPE_INVALID: "{variable}: got {got}; allowed: what abrun export writes there",
    Code.NODE_WITHOUT_RUN: "{directory}: not on {host}, and on {seen_on} it is: the nodes have to share it; "
    "launch with --runs-dir on a file system that all of them see",
    Code.PROBE_FAILED: "{probe}: ended with an error; see {log}",
    Code.PROCESSES_SURVIVE: "processes of an earlier launch cannot be killed ({pids}); end them",
    Code.RAY_SILENT: "ray: no Ray answers at {address}: {error}; {remedy}",
    Code.RAY_FAILED: "ray: {address}: {answer}",
    Code.DRIVER_WITHOUT_EXPERIMENT: "{directory}: not on {host}, which runs the driver: the cluster has to "
    "share it; launch with --runs-dir on a file system that all of its machines see",
    Code.DRIVER_WITHOUT_FOLDER: "{folder}: from where abrun was started: {error} on {host}; start it from a "
    "folder that all machines of the cluster see",
    Code.DRIVER_CANNOT_IMPORT_RAY: "{python} on {host} cannot import ray ({error}); pip install "
    "'abrun[ray]' there, or give launcher.python",
    Code.REQUEUED_TOO_OFTEN: "launcher.requeues: the job has begun again {restarts} times; --resume goes on",
    Code.SLURM_COMMAND_FAILED: "slurm: {command}: {answer}",
    Code.SLURM_COMMAND_MISSING: "slurm: no command {command:repr} on PATH; launch on a login node, or use "
    "--launcher local",
    Code.SLURM_SILENT: "slurm: {command}: no answer for {seconds:.0f} s; is the controller up?",
    Code.SLURM_NOT_CONFIGURED: "slurm: this host has Slurm's commands, but no configuration of a cluster "
    "(slurm.conf): launch on a login node, set SLURM_CONF, or use --launcher local ({command}: {answer})",
    Code.STAGES_NEED_CLAIM: "{recipe}: compare.claims: got no claim with --until-decided, so that no interim "
    "analysis could decide; declare one, or leave --until-decided out",
    Code.STAGES_NEED_TREATMENT: "{recipe}: arms: got the baseline alone with --until-decided, which adds "
    "pairs of arms until they decide; add a treatment, or leave --until-decided out",
    Code.MAX_SEEDS_WITH_INTERIM: "--max-seeds: got {max_seeds} with compare.interim {interim}, whose last "
    "takes all pairs; leave one of them out",
    Code.MAX_SEEDS_TOO_FEW: "--max-seeds: got {got} with {seeds} seeds in the recipe; allowed: more than "
    "the first analysis takes, {first_count}",
    Code.RESUME_OTHER_INTERIM: "{directory}: --until-decided: got interim analyses at {interim} pairs, and "
    "it was launched {before}, on which its level rests; resume it as it was launched, or use another --name",
    Code.ARM_CHANGES_NOTHING: "{recipe}: arms.{arm}: got {changes}, which resolves to the baseline's "
    "configuration; change at least one value (controls.aa_reruns repeats the baseline)",
    Code.ARM_VALIDATION_DIFFERS: "{recipe}: arms.{arm}.validation: not the baseline's; all arms are "
    "validated alike: set validation outside of arms",
    Code.TOLERANCE_WITHOUT_STEP_ONE: "{recipe}: compare.step_one_tolerance: got {got}, {problem}; drop it",
    Code.COMPARE_KEY_UNUSABLE: "{recipe}: compare.{key}: {problem}; or leave it out: nothing reads it",
    Code.RECIPE_CLAIM_TWICE: "{recipe}: compare.claims.{index}: got a claim twice; every claim once",
    Code.CLAIM_UNUSABLE: "{recipe}: compare.claims.{index}.{field}: {problem}",
    Code.BISECT_ORDER_REVERSED: "--bad: got {bad:repr}, which does not come after {good:repr} (--good); "
    "exchange them?",
    Code.BISECT_SAME_COMMIT: "--bad: got {bad:repr}, the very commit of --good; nothing lies between them",
    Code.TOO_MANY_COMMITS: "{option}: got {commits} commits; allowed: at most {max_commits}: narrow it down",
    Code.TOO_FEW_CANDIDATES: "{option}: got {got}; allowed: two or more, the good one first, the bad one "
    "last",
    Code.COMMIT_UNKNOWN: "{option}: got {got}, no commit of {repo} (--repo)",
    Code.BISECT_NEEDS_COMMAND: "{recipe}: trainer.type: got 'abrun'; a bisection needs a command, which "
    "runs in another checkout or environment: trainer: {{type: command, ...}} (docs/foreign-runs.md)",
    Code.BISECT_NEEDS_CLAIM: "{recipe}: compare.claims: got no claim, and a bisection finds what broke one",
    Code.BISECT_REFUSES_REFERENCE: "{recipe}: compare.reference: got {reference:repr}; a bisection compares "
    "with the good candidate: --set compare.reference=null",
    Code.BISECT_NEEDS_PAIRS: "{recipe}: compare.paired: got false; a bisection pairs candidates by seed: "
    "--set compare.paired=true",
    Code.BISECT_RUNS_HERE: "{recipe}: launcher.type: got {launcher:repr}; candidates run on this machine "
    "alone: --set launcher=null",
    Code.BISECTION_OF_OTHER_NAME: "{directory}: got {other}, of another bisection, there; choose another "
    "--name",
    Code.BISECTION_CHANGED: "{directory}: {changed}: not what this bisection began with; give what it was "
    "(its {file} has it), or choose another --name",
    Code.BISECT_NEEDS_CHECKOUT: "{recipe}: trainer.parameters.checkout: missing: every candidate's checkout "
    "takes its place; add it and write {{checkout}} into argv, or say how to install a checkout with --setup",
    Code.PYTHON_NOT_FOUND: "{recipe}: trainer.python: got {python:repr}, which is not to be found",
    Code.DEVICE_MEMORY_WITHOUT_USE: "--device-memory: got it without --dry-run, or auto for one of "
    "{keys:list}, of which it is; add one of them, or drop it",
    Code.AUTO_ASKED: "{recipe}: {fields:list}: got 'auto'",
    Code.AUTO_NEEDS_DEVICE_MEMORY: "{asked}, and {here:if this machine has no GPU|the GPUs of a cluster are "
    "not known here}; add --device-memory with what one has, such as 80GiB or h200, or give values: "
    "{instead}",
    Code.AUTO_FITS_NOWHERE: "{asked}, and nothing fits: {tried}, and a device has {device_gib:.1f} GiB; use "
    "smaller microbatches (policy.micro_batch_tokens or micro_batch_size), more ranks, more of "
    "policy.backend's parallelism or a fused policy.logprobs.impl",
    Code.AUTO_BACKEND_NOT_PREDICTED: "{asked} with arms.{arm} on policy.backend.type {backend!r}, whose "
    "step cannot be predicted; give values: {instead}",
    Code.AUTO_NOT_PREDICTED: "{asked}, and arms.{arm} cannot be predicted here: {problem}",
    Code.AUTO_NOT_MEASURED: "{asked}, and a step of arms.{arm} with {values} could not be measured: "
    "{error}; or give values: {instead}",
    Code.RESUME_VALUE_NOT_AUTO: "{directory}: --resume: its recipe has no {field} (got {got:repr}), and "
    "this one says auto; give what it was launched with: {instead}",
    Code.BACKEND_NOT_PREDICTED: "policy.backend.type: got {backend:repr}, whose step cannot be predicted; "
    "use type: dtensor, or measure it on GPUs, without --predict",
    Code.MASTER_DTYPE_DIFFERS: "--master-dtype: got {master_dtype} with policy.dtype {dtype}; add --set "
    "policy.dtype={master_dtype}",
    Code.DEVICE_MEMORY_SYNTAX: "--device-memory: got {got:repr}; allowed: a size such as 80GiB, or one of "
    "{cards:list}",
    Code.MEASURES_ABRUN_TRAINER: "{recipe}: arms.{arm}: trainer.type: got 'command'; memory-profile runs "
    "single steps of abrun's own trainer alone: measure a foreign one with its own tools",
    Code.SEARCH_NEEDS_BUDGET: "--budget-gib: got none with a search on CPU cores, where nothing refuses "
    "memory before the machine has none; give one",
    Code.SEQUENCES_ODD: "--sequences: got {got} with algorithm.type 'dpo', whose pairs stay together; use "
    "an even number",
    Code.SWEEP_KEY_TWICE: "--sweep: got {key} twice; give all its values at once, such as {key}=A,B",
    Code.SWEEP_KEY_OF_ARM: "--sweep: got {key}, and arms.{arm} has its own {arm_key}; sweep another key, or "
    "drop it there with --set",
    Code.LENGTHS_TOO_LONG: "--lengths: got {got}; this model takes {max_tokens} tokens: use at most that "
    "many",
    Code.MAX_SEEDS_WITHOUT_STAGES: "--max-seeds: got {max_seeds} without --until-decided; add it, or use "
    "--seeds",
    Code.STAGES_NEED_LAUNCHER: "--until-decided: got launcher {launcher}, whose jobs need no launcher: "
    "nobody is there to judge between the stages; use --launcher local, or declare compare.interim, "
    "launch all, and end it with abrun cancel once abrun compare decides",
    Code.STAGES_NEED_COMPARISON: "--until-decided: got --no-compare, without which nothing is "
    "decided; drop one",
    Code.DETACH_NEEDS_QUEUE: "--detach: the local launcher has no queue; use nohup or tmux, or --launcher "
    "slurm or ray",
    Code.JSON_WITHOUT_DRY_RUN: "--json: got it without --dry-run, of which it is; add that, or drop it",
    Code.NO_RUN: "{run}: no run here; give a run's folder, such as {runs_dir}/EXPERIMENT/baseline/seed-0, "
    "or an experiment ({runs})",
    Code.NO_RUN_STARTED: "{experiment}: none of its runs was started; launch it first",
    Code.WEIGHTS_NOT_KNOWN: "{run}: trainer.type: got 'command', a foreign trainer's run, whose weights "
    "abrun does not know; give a run of abrun's own trainer",
    Code.ALGORITHM_WITHOUT_ENGINE: "{run}: algorithm.type: got {algorithm:repr}, which trains on no "
    "completions of an engine; give a run of grpo or ppo",
    Code.NO_CHECKPOINT: "{run}: no checkpoint is left of its steps; give --step 0 to go on from its first "
    "weights, or launch it again with a checkpoint.every below its steps",
    Code.STEP_WITHOUT_CHECKPOINT: "--step: got {got}; {run} has the weights after steps {steps}: give one",
    Code.CHECKPOINT_OF_OTHER_RUN: "{checkpoint}: was written by {written_by:repr}; this run is {run:repr}",
    Code.FIRST_WEIGHTS_GONE: "{weights}: the weights that {run} began with are gone; launch it again with "
    "--resume, or give the step of a checkpoint",
    Code.SCORED_ON_ONE_RANK: "--set: got {got:repr}; everything is scored on one rank: leave cluster as it "
    "is",
    Code.SCORES_NOT_CHANGED: "--set: got {got:repr}, which changes nothing of how this run's trainer scores "
    "tokens; give another value of a key of policy or model, or of rollout.temperature, min_p, top_k, top_p "
    "or exact_support",
}
