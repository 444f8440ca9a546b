"""Sentences of refusals to launch, continue or cancel runs."""

from abrun.messages.codes import Code
from abrun.messages.message import Message


def _problems(recipe: str, problems: list[str]) -> str:
    omitted = f" (and {len(problems) - 1} more: see --dry-run)" if len(problems) > 1 else ""
    return f"{recipe}: {problems[0]}{omitted}"


MESSAGES: dict[Code, Message] = {
    Code.SYNC_NEEDS_PACKAGE: "{directory}: wandb-sync {problem}",
    Code.NOT_MEASURED_HERE: "cluster: got {nodes} node(s) x {gpus_per_node} GPU(s){engines:if  and "
    "rollout.devices {engines}}, but this machine, which measures it, has {machine}; use --set "
    "cluster.gpus_per_node=...",
    Code.PLAN_CANNOT_RUN: _problems,
    Code.GPUS_NOT_SHARED: "cluster.runs_per_gpu: got {runs_per_gpu}, but runs cannot share GPUs on "
    "{launcher}: {why}; use 1",
    Code.MPS_NOT_STARTED: "cluster.runs_per_gpu: runs share GPUs by time slices, without CUDA's "
    "multi-process service: {problem}",
    Code.NODE_CANNOT_RUN: "{host}: {problem}",
    Code.JOBS_LEFT_IN_QUEUE: "{error}; the jobs submitted before ({jobs:list}) are still in the queue "
    "({problem}); cancel them: abrun stop {directory}",
    Code.SLURM_REFUSES_JOB: "slurm: {answer} (requested: {options})",
    Code.LAUNCHED_ELSEWHERE: "{directory}: {owner} is launching it; stop it there",
    Code.LAUNCHER_UNREACHABLE: "{directory}: {owner} is launching it and cannot be reached: {error}",
    Code.FAULTS_NEED_ABRUN_TRAINER: "{recipe}: arms.baseline: runs a foreign trainer, but faults can only be "
    "injected into abrun's own",
    Code.FAULT_NEEDS: "--faults: got {fault:repr}, which {needs}; change that with --set, or drop the fault",
    Code.NO_FAULT_FITS: "{recipe}: no fault can be injected into it; see: abrun faults",
    Code.EXPERIMENT_NAME_INVALID: "--name: got {got:repr}; allowed: letters, digits, '.', '_' and '-', at "
    "most 100, but not {reserved:repr}",
    Code.EXPERIMENT_EXISTS: "{directory}: an experiment already exists here ({finished} of {runs} runs "
    "finished); continue it with --resume, or choose another --name",
    Code.DIRECTORY_IN_USE: "{directory}: is not empty and not an experiment; choose another --name",
    Code.JOBS_QUEUED: "{directory}: --resume: its jobs are still in the queue ({jobs:list}); wait for them, "
    "or cancel them: abrun stop {directory}",
    Code.RESUME_LACKS_RUN: "{directory}: --resume: the recipe no longer has the run {run}, which exists "
    "here; restore arms, seeds and aa_reruns (adding runs is allowed), or choose another --name",
    Code.RESUME_OTHER_RECIPE: "{directory}: --resume: the run was launched with another recipe: "
    "{difference}; restore the recipe, or choose another --name",
    Code.RESUME_OTHER_WARM_START: "{directory}: --resume: {run} would start from the warm start "
    "{warm_start}, but the other runs of its arm started from {recorded}; this version of abrun makes warm "
    "starts differently; resume with the version that launched them, or choose another --name",
    Code.NODE_WITHOUT_RUN: "{directory}: exists on {seen_on}, but not on {host}; launch with --runs-dir on a "
    "file system that all nodes share",
    Code.PROBE_FAILED: "{probe}: ended with an error; see {log}",
    Code.PROCESSES_SURVIVE: "processes of an earlier launch cannot be killed ({pids}); end them",
    Code.ROLLOUTS_MISSING: "rollout.from: {source} has no recorded rollouts of seed {seed}; give a run, an "
    "experiment or an arm that has trained with rollout.record: true, or a folder with seed-{seed}/",
    Code.ROLLOUTS_DAMAGED: "{path}: unusable rollouts: {problem}; record them again",
    Code.ROLLOUTS_UNFIT: "rollout.from: {path}: {problem}; {remedy}",
    Code.ROLLOUTS_NOT_RECORDED: "{recipe}: arms.{arm}.rollout.from: got {got:repr}, an arm that does not "
    "record its rollouts; set rollout.record: true",
    Code.RECORDING_NOT_AWAITED: "rollout.from: got {got:repr}, an arm of the recipe, but separate jobs do "
    "not wait for each other; launch the recording arms first, and give the path of their experiment",
    Code.RAY_SILENT: "ray: no Ray answers at {address}: {error}; {remedy}",
    Code.RAY_FAILED: "ray: {address}: {answer}",
    Code.DRIVER_WITHOUT_EXPERIMENT: "{directory}: does not exist on {host}, which runs the driver; launch "
    "with --runs-dir on a file system that all machines of the cluster share",
    Code.DRIVER_WITHOUT_FOLDER: "{folder}: cannot be the working directory on {host}: {error}; start abrun "
    "from a folder that all machines of the cluster share",
    Code.DRIVER_CANNOT_IMPORT_RAY: "{python} on {host} cannot import ray ({error}); pip install 'abrun[ray]' "
    "there, or set launcher.python",
    Code.REQUEUED_TOO_OFTEN: "launcher.requeues: the job was restarted {restarts} times; continue with "
    "--resume",
    Code.SLURM_COMMAND_FAILED: "slurm: {command}: {answer}",
    Code.SLURM_COMMAND_MISSING: "slurm: no command {command:repr} on PATH; launch on a login node, or use "
    "--launcher local",
    Code.SLURM_SILENT: "slurm: {command}: no answer for {seconds:.0f} s; is the controller up?",
    Code.SLURM_NOT_CONFIGURED: "slurm: this host has Slurm's commands, but no cluster configuration "
    "(slurm.conf; {command}: {answer}); launch on a login node, set SLURM_CONF, or use --launcher local",
    Code.INTERIM_SAVES: "Interim analyses are cheaper: {pairs_if_equal:.3g} pairs on average if the arms are "
    "equal, at most {max_pairs}; one analysis with the same P(match) takes {fixed_pairs:.3g}; launch with "
    "{options}",
    Code.INTERIM_COSTS_MORE: "One analysis is cheaper: {fixed_pairs:.3g} pairs; interim analyses with the "
    "same P(match) take {pairs_if_equal:.3g} on average if the arms are equal",
    Code.STAGES_NEED_CLAIM: "{recipe}: compare.claims: empty, but --until-decided needs a claim to decide; "
    "declare one, or drop --until-decided",
    Code.STAGES_NEED_TREATMENT: "{recipe}: arms: only a baseline, but --until-decided compares arms; add a "
    "treatment, or drop --until-decided",
    Code.MAX_SEEDS_WITH_INTERIM: "--max-seeds: got {max_seeds}, but compare.interim is {interim} and ends "
    "with all pairs; drop one of them",
    Code.MAX_SEEDS_TOO_FEW: "--max-seeds: got {got} with {seeds} seeds in the recipe; allowed: more than the "
    "first interim analysis takes, {first_count}",
    Code.RESUME_OTHER_INTERIM: "{directory}: --until-decided: got interim analyses at {interim} pairs, but "
    "it was launched {before}, on which its error rate depends; resume it as it was launched, or choose "
    "another --name",
    Code.ARM_CHANGES_NOTHING: "{recipe}: arms.{arm}: got {changes}, which resolves to the baseline's "
    "configuration; change at least one value (controls.aa_reruns repeats the baseline)",
    Code.ARM_VALIDATION_DIFFERS: "{recipe}: arms.{arm}.validation: differs from the baseline's, but all arms "
    "are validated alike; set validation outside of arms",
    Code.TOLERANCE_WITHOUT_STEP_ONE: "{recipe}: compare.step_one_tolerance: got {got}, {problem}; drop it",
    Code.COMPARE_KEY_UNUSABLE: "{recipe}: compare.{key}: {problem}; or drop it",
    Code.RECIPE_CLAIM_TWICE: "{recipe}: compare.claims.{index}: repeats an earlier claim; drop it",
    Code.CLAIM_UNUSABLE: "{recipe}: compare.claims.{index}.{field}: {problem}",
    Code.BISECT_ORDER_REVERSED: "--bad: got {bad:repr}, which does not come after {good:repr} (--good); swap "
    "them?",
    Code.BISECT_SAME_COMMIT: "--bad: got {bad:repr}, the same commit as --good; nothing lies between them",
    Code.TOO_MANY_COMMITS: "{option}: got {commits} commits; allowed: at most {max_commits}; narrow the "
    "range",
    Code.TOO_FEW_CANDIDATES: "{option}: got {got}; allowed: two or more different ones, the good one first, "
    "the bad one last",
    Code.COMMIT_UNKNOWN: "{option}: got {got}, which is not a commit of {repo} (--repo)",
    Code.BISECT_NEEDS_COMMAND: "{recipe}: trainer.type: got 'abrun', but a bisection runs a command in each "
    "checkout or environment; use trainer: {{type: command, ...}} (docs/tutorials/own-trainer.md)",
    Code.BISECT_NEEDS_CLAIM: "{recipe}: compare.claims: empty, but a bisection needs a claim that broke; "
    "declare one",
    Code.BISECT_REFUSES_REFERENCE: "{recipe}: compare.reference: got {reference:repr}, but a bisection "
    "compares with the good candidate; --set compare.reference=null",
    Code.BISECT_NEEDS_PAIRS: "{recipe}: compare.paired: got false, but a bisection pairs candidates by seed; "
    "--set compare.paired=true",
    Code.BISECT_RUNS_HERE: "{recipe}: launcher.type: got {launcher:repr}, but candidates run only on this "
    "machine; --set launcher=null",
    Code.BISECTION_OF_OTHER_NAME: "{directory}: holds {other} of another bisection; choose another --name",
    Code.BISECTION_CHANGED: "{directory}: {changed}: differs from the value this bisection began with; "
    "restore it (see its {file}), or choose another --name",
    Code.BISECT_NEEDS_CHECKOUT: "{recipe}: trainer.parameters.checkout: missing, but each candidate's "
    "checkout replaces it; add it and write {{checkout}} into argv, or install a checkout with --setup",
    Code.PYTHON_NOT_FOUND: "{recipe}: trainer.python: got {python:repr}, which does not exist",
    Code.DEVICE_MEMORY_WITHOUT_USE: "--device-memory: requires --dry-run, or auto for one of {keys:list}; "
    "add one of them, or drop it",
    Code.AUTO_ASKED: "{recipe}: {fields:list}: got 'auto'",
    Code.AUTO_NEEDS_DEVICE_MEMORY: "{asked}, but {here:if this machine has no GPU|the cluster's GPUs are "
    "unknown here}; add --device-memory with the memory of one, such as 80GiB or h200, or give values: "
    "{instead}",
    Code.AUTO_FITS_NOWHERE: "{asked}, but nothing fits: {tried}, and a device has {device_gib:.1f} GiB; use "
    "smaller micro-batches (policy.micro_batch_tokens or micro_batch_size), more ranks, more of "
    "policy.backend's parallelism or a fused policy.logprobs.impl",
    Code.AUTO_BACKEND_NOT_PREDICTED: "{asked}, but the memory of arms.{arm} cannot be predicted with "
    "policy.backend.type {backend!r}; give values: {instead}",
    Code.AUTO_NOT_PREDICTED: "{asked}, but the memory of arms.{arm} cannot be predicted here: {problem}",
    Code.AUTO_NOT_MEASURED: "{asked}, but a step of arms.{arm} with {values} could not be measured: {error}; "
    "or give values: {instead}",
    Code.RESUME_VALUE_NOT_AUTO: "{directory}: --resume: it was launched without {field} (got {got:repr}), "
    "but this recipe says auto; give the value that it was launched with: {instead}",
    Code.BACKEND_NOT_PREDICTED: "policy.backend.type: got {backend:repr}, whose memory cannot be predicted; "
    "use type: dtensor, or measure it on GPUs without --predict",
    Code.MASTER_DTYPE_DIFFERS: "--master-dtype: got {master_dtype} with policy.dtype {dtype}; add --set "
    "policy.dtype={master_dtype}",
    Code.DEVICE_MEMORY_SYNTAX: "--device-memory: got {got:repr}; allowed: a size such as 80GiB, or one of "
    "{cards:list}",
    Code.MEASURES_ABRUN_TRAINER: "{recipe}: arms.{arm}: trainer.type: got 'command', but memory-profile only "
    "runs steps of abrun's own trainer; measure a foreign one with its own tools",
    Code.SEARCH_NEEDS_BUDGET: "--budget-gib: missing; a search on CPU cores needs a limit, because the "
    "machine would run out of memory",
    Code.SEQUENCES_ODD: "--sequences: got {got} with algorithm.type 'dpo', which keeps pairs together; use "
    "an even number",
    Code.SWEEP_KEY_TWICE: "--sweep: got {key} twice; give all its values at once, such as {key}=A,B",
    Code.SWEEP_KEY_OF_ARM: "--sweep: got {key}, but arms.{arm} sets its own {arm_key}; sweep another key, or "
    "drop the arm's with --set",
    Code.LENGTHS_TOO_LONG: "--lengths: got {got}; allowed: at most {max_tokens} tokens, the model's context "
    "length",
    Code.MAX_SEEDS_WITHOUT_STAGES: "--max-seeds: got {max_seeds}, which requires --until-decided; add it, or "
    "use --seeds",
    Code.STAGES_NEED_LAUNCHER: "--until-decided: got launcher {launcher}, whose jobs run without a launcher "
    "to judge between stages; use --launcher local, or declare compare.interim, launch all runs, and stop "
    "them with abrun stop once abrun compare decides",
    Code.STAGES_NEED_COMPARISON: "--until-decided: got --no-compare, which prevents a decision; drop one of "
    "them",
    Code.DETACH_NEEDS_QUEUE: "--detach: the local launcher has no queue; use nohup or tmux, or --launcher "
    "slurm or ray",
    Code.JSON_WITHOUT_DRY_RUN: "--json requires --dry-run",
    Code.NO_RUN: "{run}: no such run; give a run's folder, such as {runs_dir}/EXPERIMENT/baseline/seed-0, or "
    "an experiment ({runs})",
    Code.NO_RUN_STARTED: "{experiment}: no run has started yet; launch it first",
    Code.WEIGHTS_NOT_KNOWN: "{run}: was made by a foreign trainer, whose weights abrun cannot read; give a "
    "run of abrun's own trainer",
    Code.ALGORITHM_WITHOUT_ENGINE: "{run}: algorithm.type: got {algorithm:repr}, which does not use a "
    "rollout engine; give a run of grpo or ppo",
    Code.NO_CHECKPOINT: "{run}: has no checkpoint; use its initial weights with --step 0, or launch it again "
    "with checkpoint.every below its number of steps",
    Code.STEP_WITHOUT_CHECKPOINT: "--step: got {got}; {run} has the weights after steps {steps}; give one of "
    "them",
    Code.CHECKPOINT_OF_OTHER_RUN: "{checkpoint}: was written by {written_by:repr}, not by this run, "
    "{run:repr}",
    Code.FIRST_WEIGHTS_GONE: "{weights}: the initial weights of {run} are missing; launch it again with "
    "--resume, or give the step of a checkpoint",
    Code.SCORED_ON_ONE_RANK: "--set: got {got:repr}, but tokens are scored on one rank; leave cluster as it "
    "is",
    Code.SCORES_NOT_CHANGED: "--set: got {got:repr}, which does not change how this trainer scores tokens; "
    "set a key of policy or model, or rollout.temperature, min_p, top_k, top_p or exact_support",
}
