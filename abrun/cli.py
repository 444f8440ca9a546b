"""The command line: parse, call one function, print. Everything slow to import waits inside its command."""

import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from abrun.arguments import (
    Aliases,
    AllowInconclusive,
    Baseline,
    Claims,
    Detach,
    DryRun,
    Experiment,
    Formats,
    Group,
    Launcher,
    Name,
    NoCompare,
    NoStepOne,
    Overrides,
    Pattern,
    RecipeFile,
    Reference,
    ReportFolder,
    Resume,
    RunsDir,
    Sources,
    StepColumn,
    TakeOver,
    ToWandb,
    parse_formats,
    parse_lengths,
    parse_seeds,
)
from abrun.errors import AbrunError, RecipeError
from abrun.redaction import shown

if TYPE_CHECKING:
    from abrun.terminal import Terminal

app = typer.Typer(
    help="Run paired A/B experiments in RL post-training, and say whether the arms converge the same way.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command()
def launch(
    recipe: RecipeFile,
    overrides: Overrides = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds instead of the recipe's: 0,1,2 or 0-4.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once; by default as many as the devices allow.")
    ] = None,
    launcher: Launcher = None,
    runs_dir: RunsDir = Path("runs"),
    name: Name = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    detach: Detach = False,
    take_over: TakeOver = False,
    no_compare: NoCompare = False,
) -> None:
    """Run an experiment: all arms and seeds, watched live, then compared.

    Exit code: 0 when every run finished, 1 when one did not, 2 for bad input, 130 after Ctrl-C.
    """
    from abrun.launch import experiment_dir_of, make_engine, make_scheduler
    from abrun.plan import make_plan
    from abrun.recipe import launcher_settings, load_recipe

    changes = [*(overrides or []), *([f"seeds={parse_seeds(seeds)}"] if seeds is not None else [])]
    plan = make_plan(load_recipe(recipe, changes))
    experiment_dir = experiment_dir_of(plan, runs_dir, name)
    settings = launcher_settings(plan.recipe.launcher, launcher)
    scheduler = make_scheduler(settings, jobs)
    console = _console()
    if scheduler is None:
        make_engine("local" if launcher is None else launcher, jobs)  # refuses a name that none has
    if dry_run:
        from abrun.launch.preview import preview, preview_of_jobs

        show = preview(plan, jobs) if scheduler is None else preview_of_jobs(plan, scheduler, experiment_dir)
        console.print(show)
        return
    from abrun.launch import launch_or_hand_over, queued_jobs
    from abrun.watch import View

    with View(console, queued_jobs) as view:
        outcome = launch_or_hand_over(
            plan,
            runs_dir,
            scheduler=scheduler,
            observer=view,
            launcher=launcher,
            name=name,
            jobs=jobs,
            resume=resume,
            take_over=take_over,
            compare=not no_compare,
            detach=detach,
        )
    if outcome is None:
        return
    if outcome.exit_code:
        _say_how_to_go_on(console, stopped=outcome.stopped_by is not None, resume=resume)
    queued = queued_jobs(experiment_dir) if scheduler else None
    if not (outcome.stopped_by or no_compare):
        _compare_after_launch(experiment_dir, console, queued.compared() if queued else None)
    raise typer.Exit(outcome.exit_code)


@app.command()
def export(
    recipe: RecipeFile,
    to: Annotated[str, typer.Option(help="The engine: jobset (Kubernetes), skypilot.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new folder; default: <name>-<engine>.")
    ] = None,
    overrides: Overrides = None,
    name: Name = None,
    no_compare: NoCompare = False,
) -> None:
    """Write an experiment's manifests for an engine that abrun itself starts nothing on."""
    from abrun.launch import experiment_dir_of
    from abrun.launch.export import export as write_manifests
    from abrun.plan import make_plan
    from abrun.recipe import load_recipe

    plan = make_plan(load_recipe(recipe, overrides or []))
    name = experiment_dir_of(plan, Path(), name).name
    print(shown(write_manifests(plan, to, output or Path(f"{name}-{to}"), name, compare=not no_compare)))


@app.command()
def compare(
    sources: Sources,
    primary: Claims = None,
    reference: Reference = None,
    arm: Annotated[str | None, typer.Option(help="With --reference: which arm (the baseline).")] = None,
    baseline: Baseline = None,
    pattern: Pattern = None,
    group: Group = None,
    alias: Aliases = None,
    step_column: StepColumn = None,
    no_step_one: NoStepOne = False,
    output: ReportFolder = None,
    formats: Formats = "terminal,html,markdown,json,png,svg",
    allow_inconclusive: AllowInconclusive = False,
    wandb: ToWandb = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Judge whether arms converge the same way: an experiment, or runs that any framework logged.

    Exit code: 0 MATCH, 3 MISMATCH, 4 INCONCLUSIVE, 5 INVALID, 2 for bad input.
    """
    from abrun.compare import compare_sources
    from abrun.compare.read.sources import Reading
    from abrun.recipe import parse_primary

    wanted = parse_formats(formats)
    comparison = compare_sources(
        sources,
        Reading(
            runs_dir=runs_dir,
            baseline=baseline,
            pattern=pattern,
            group=group,
            aliases=tuple(alias or ()),
            step_column=step_column,
        ),
        primaries=[parse_primary(text) for text in primary] if primary else None,
        reference=reference,
        arm=arm,
        step_one=not no_step_one,
        output=output,
        formats=[form for form in wanted if form != "terminal"],
    )
    if "terminal" in wanted:
        _console().print(comparison.summary())
    if wandb:
        from abrun.compare.read.sources import stored_in
        from abrun.mirror.report import upload

        print(shown(upload(comparison.as_json(), comparison.files, stored_in(sources, runs_dir))))
    tolerated = allow_inconclusive and comparison.verdict == "INCONCLUSIVE"
    raise typer.Exit(0 if tolerated else comparison.exit_code)


@app.command()
def freeze(
    sources: Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="The reference file to write.")],
    arm: Annotated[str | None, typer.Option(help="Which arm; default: the baseline.")] = None,
    primary: Claims = None,
    baseline: Baseline = None,
    pattern: Pattern = None,
    group: Group = None,
    alias: Aliases = None,
    step_column: StepColumn = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Freeze the runs of an arm as a reference ensemble: a small file, to compare later runs with."""
    from abrun.compare.read.reference import freeze as write_reference
    from abrun.compare.read.sources import Reading, open_sources
    from abrun.recipe import parse_primary

    reading = Reading(
        runs_dir=runs_dir,
        baseline=baseline,
        pattern=pattern,
        group=group,
        aliases=tuple(alias or ()),
        step_column=step_column,
        alone=True,
    )
    primaries = [parse_primary(text) for text in primary] if primary else None
    experiment = open_sources(sources, reading, primaries)
    write_reference(experiment, arm or experiment.baseline, output)
    seeds = len(experiment.arm(arm or experiment.baseline))
    _console().print(
        f"{output}: {seeds} seeds; compare later runs with: abrun compare NEW --reference {output}",
        soft_wrap=True,
        markup=False,
    )


@app.command()
def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    earlier: Annotated[
        str | None, typer.Option("--from", help="Measure spread and correlation in this earlier experiment.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(min=0, help="Spread over seeds of one arm, for every claim.")
    ] = None,
    correlation: Annotated[
        float | None, typer.Option(min=-0.99, max=0.99, help="Correlation of arms that share a seed.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Say how many seeds the declared margins take, before any GPU is spent."""
    from abrun.compare.read.stored import load_experiment
    from abrun.compare.show.planning import plan_report
    from abrun.plan import make_plan
    from abrun.recipe import load_recipe
    from abrun.store import find_experiment

    if earlier and (sigma is not None or correlation is not None):
        raise RecipeError(
            f"--from: got {earlier!r} and --sigma or --correlation, which it measures; give one"
        )
    if sigma is not None and not math.isfinite(sigma):
        raise RecipeError(f"--sigma: got {sigma}; allowed: a finite number of 0 or more")
    loaded = load_recipe(recipe, overrides or [])
    make_plan(loaded)  # refuses what a launch would refuse
    report = plan_report(
        loaded.name,
        loaded.compare,
        len(loaded.seeds),
        earlier=load_experiment(find_experiment(earlier, runs_dir)) if earlier else None,
        sigma=sigma,
        correlation=correlation,
    )
    _console().print(report)


@app.command("memory-profile")
def memory_profile(
    recipe: RecipeFile,
    overrides: Overrides = None,
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths to measure, in tokens, prompt and completion together.")
    ] = "128,256,512,1024",
    sequences: Annotated[
        int | None,
        typer.Option(min=1, help="A rank's microbatch of sequences; default: the recipe's, or 1 (dpo: 2)."),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    output: Annotated[
        Path | None, typer.Option(help="Where table and plot go; default: <runs-dir>/<recipe>-memory.")
    ] = None,
) -> None:
    """Measure the peak memory of a training step by phase and arm, on this machine's device."""
    from abrun.memory.profile import measure_recipe
    from abrun.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    output = output or runs_dir / f"{loaded.name.removesuffix('-memory')}-memory"
    profile = measure_recipe(loaded, output, lengths=parse_lengths(lengths), num_sequences=sequences)
    console = _console()
    console.print(profile.table())
    console.print(f"peaks.json, memory.png and memory.svg are in {output}", soft_wrap=True, markup=False)


@app.command()
def mismatch(
    run: Annotated[
        str,
        typer.Argument(help="A run's folder, or an experiment, of which a run is chosen and named."),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Which weights: those after this step (default: the newest checkpoint)."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="One more change to score by; repeatable.",
        ),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Score only so many of the step's sequences.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the report goes; default: RUN/mismatch.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Say what makes the log-probs of a run's trainer and rollout engine differ, and by how much."""
    from abrun.mismatch.command import measure_run
    from abrun.mismatch.report import summary

    console = _console()
    budget, folder = measure_run(
        run,
        runs_dir,
        step=step,
        sets=sets or (),
        num_sequences=sequences,
        output=output,
        say=lambda line: console.print(line, soft_wrap=True, markup=False),
    )
    console.print(summary(budget))
    console.print(f"The report is in {folder}", soft_wrap=True, markup=False)


@app.command()
def watch(experiment: Experiment, runs_dir: RunsDir = Path("runs")) -> None:
    """Follow an experiment that another shell or another host launches, or the jobs of a cluster."""
    from abrun import watch as live
    from abrun.launch import queued_jobs
    from abrun.store import find_experiment

    live.watch(find_experiment(experiment, runs_dir), _console(), queued_jobs)


@app.command()
def status(
    experiment: Annotated[str | None, typer.Argument(help="A path, or a name; without one: all.")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show what the runs of an experiment are doing, or all experiments in a line each."""
    from abrun import watch as live
    from abrun.store import find_experiment

    console = _console()
    if experiment is None:
        console.print(live.status_of_experiments(runs_dir))
        return
    from abrun.launch import queued_jobs

    experiment_dir = find_experiment(experiment, runs_dir)
    views = live.ExperimentReader(experiment_dir, queued_jobs).read()
    console.print(live.render(experiment_dir.name, views, console.width))


@app.command()
def cancel(experiment: Experiment, runs_dir: RunsDir = Path("runs")) -> None:
    """Stop an experiment: its runs save a checkpoint and end, its waiting jobs leave the queue."""
    from abrun.launch import cancel as cancel_experiment
    from abrun.store import find_experiment

    print(shown(cancel_experiment(find_experiment(experiment, runs_dir))))


@app.command()
def logs(
    run: Annotated[
        str, typer.Argument(help="A run's folder, or its name such as quickstart/baseline/seed-0.")
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print on until the run has ended.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Print what a run has printed."""
    from abrun import watch as live
    from abrun.launch import queued_jobs

    path = runs_dir / run
    for part in live.log_of(path if path.is_dir() else Path(run), queued_jobs, follow=follow):
        sys.stdout.write(part)
        sys.stdout.flush()


@app.command()
def sync(experiment: Experiment, runs_dir: RunsDir = Path("runs")) -> None:
    """Send wandb what it lacks of an experiment's runs, such as those recorded offline."""
    from abrun.mirror.sync import sync as send
    from abrun.store import find_experiment

    send(find_experiment(experiment, runs_dir), print)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For machines: all of it as JSON.")] = False,
) -> None:
    """Show what this machine can run, and what each thing that it cannot run lacks. Exit code 0."""
    from abrun.launch.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        print(diagnosis.as_json())
    else:
        _console().print(diagnosis.render())


def main() -> None:
    """The entry point: every error that a user can mend is one line on stderr and exit code 2."""
    sys.exit(_run())


def _run() -> int:
    if sys.stdout is None:  # closed by the shell, as in `abrun status >&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        return app(sys.argv[1:] or ["--help"], prog_name="abrun", standalone_mode=False) or 0
    except TyperException as error:
        return _complain(_usage(error))
    except AbrunError as error:
        return _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `abrun status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # such as a path that is too long, or a folder that may not be read
        where = error.filename or "what is written to, perhaps the standard output"
        return _complain(f"{where}: {error.strerror or error}")


def _complain(message: str) -> int:
    print(f"abrun: {shown(' '.join(message.split()))}", file=sys.stderr)
    return 2


def _usage(error: Any) -> str:
    """What typer calls a usage error, in one line."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "abrun"
    invalid = getattr(error.__cause__, "errors", list)()  # pydantic's, which knows the value
    got = f"got {invalid[0]['input']!r}; " if invalid else ""
    message = error.format_message().rstrip(".").replace("Input should be ", f"{got}allowed: ")
    return f"{message}; see: {command} --help"


def _console() -> "Terminal":
    from abrun.terminal import terminal

    return terminal()


def _say_how_to_go_on(console: "Terminal", *, stopped: bool, resume: bool) -> None:
    again = shlex.join(["abrun", *sys.argv[1:], *([] if resume else ["--resume"])])
    state = "Stopped" if stopped else "Not every run finished"
    console.print(f"{state}. Continue with: {again}", soft_wrap=True, markup=False)


def _compare_after_launch(experiment_dir: Path, console: "Terminal", compared: str | None) -> None:
    """Print what a job has `compared`, or else compare here."""
    if compared:
        console.print(compared, soft_wrap=True, markup=False, highlight=False)
        return
    from abrun.compare import compare_sources
    from abrun.compare.read.sources import Reading

    try:
        comparison = compare_sources([str(experiment_dir)], Reading())
    except AbrunError as error:  # said here: the exit code speaks of the runs
        _complain(str(error))
        return
    console.print(comparison.summary())


if __name__ == "__main__":
    main()
