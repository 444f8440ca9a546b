"""The command `abrun gate`. Slow imports happen inside it."""

from pathlib import Path
from typing import Annotated

import typer

from abrun.cli.app import console, make_group, print_json, survive_output_errors
from abrun.cli.arguments import (
    Aliases,
    Exclude,
    Group,
    Json,
    Pattern,
    RunsDir,
    Seeds,
    StepColumn,
    make_reading,
    refuse_options,
)
from abrun.errors import RecipeError
from abrun.messages import sentences

# BETTER is the only answer to keep a candidate by; the incumbent itself has been kept
EXIT_CODES = {"BETTER": 0, "INCUMBENT": 0, "WORSE": 3, "OPEN": 4, "ALIKE": 6}

Ledger = Annotated[
    Path, typer.Option("--against", metavar="LEDGER", help="File of answers, which each call extends.")
]
Candidate = Annotated[
    str | None,
    typer.Argument(
        metavar="CANDIDATE", help="Runs of one arm, as for abrun compare; default: show the ledger."
    ),
]
StartIt = Annotated[
    bool, typer.Option("--start", help="Write a new ledger, with CANDIDATE as the first incumbent.")
]
GateClaim = Annotated[
    str | None,
    typer.Option(
        "--claim",
        metavar="METRIC:WINDOW:better N",
        help="With --start: what an improvement is, such as 'train/reward:last 20%:better 0'.",
    ),
]
Worth = Annotated[
    str | None,
    typer.Option(
        help="With --start: the improvement that must not be missed; ALIKE rules it out. A number in the "
        "metric's unit, or standard deviations of a run. Default: '2 sigma'."
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(
        min=0.001, max=0.2, help="With --start: share of false BETTER among all BETTER. Default: 0.05."
    ),
]


commands = make_group()


@commands.command(rich_help_panel="Verdicts")
@survive_output_errors
def gate(
    against: Ledger,
    candidate: Candidate = None,
    start: StartIt = False,
    claim: GateClaim = None,
    worth: Worth = None,
    alpha: Alpha = None,
    arm: Annotated[str | None, typer.Option(help="Arm to judge, if there are several.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the candidate in the ledger; default: its folder's.")
    ] = None,
    pattern: Pattern = None,
    group: Group = None,
    alias: Aliases = None,
    step_column: StepColumn = None,
    seeds: Seeds = None,
    exclude: Exclude = None,
    as_json: Json = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Keep or discard many candidates, at a false discovery rate.

    Each candidate is compared with the incumbent, whose runs are reused. The answer is BETTER (the candidate
    becomes the incumbent), WORSE, ALIKE (no improvement worth finding), or OPEN with the seeds to add. A
    candidate may start with one seed and be asked about after each new one, at most 8: the level of its test
    (LORD++) pays for all readings. BETTER needs 3 seeds. Asking about the incumbent adds its new runs. Copies
    are refused, also of runs that the ledger knows under another name. A failed run is WORSE.

    Exit code: 0 BETTER, 3 WORSE, 4 OPEN, 6 ALIKE; 2 for bad input.

    Examples:
        abrun gate runs/base --against gate.jsonl --start --claim 'train/reward:last 20%:better 0'
        abrun gate runs/idea-7 --against gate.jsonl --json
        abrun gate --against gate.jsonl
    """
    from abrun.messages.records import encode_reasons
    from abrun.recipe.claims import parse_claim
    from abrun.tools.drift import gate as asking
    from abrun.tools.drift.store import read_state

    if not start:
        refuse_options({"--claim": claim, "--worth": worth, "--alpha": alpha}, needed="--start")
    selection = (pattern, group, alias, step_column, seeds, exclude)
    reading = make_reading(runs_dir, None, *selection, allows_one_arm=True)
    answer, reasons = None, []
    if start:
        if candidate is None or claim is None:
            raise RecipeError(f"--start requires {'CANDIDATE' if candidate is None else '--claim'}; add it")
        options = {"arm": arm, "name": name, "worth": worth, "alpha": alpha}
        state, reasons = asking.start_gate(against, candidate, reading, parse_claim(claim), **options)
    elif candidate is None:
        state = read_state(against)
    else:
        answer, state, reasons = asking.ask_gate(against, candidate, reading, arm=arm, name=name)
    lines = sentences(reasons)
    if as_json:
        content = asking.as_json(answer, state)
        print_json({**content, "notes": lines, "note_codes": encode_reasons(reasons)})
    else:
        if answer is None:
            console().print(asking.render_state(state))
        for line in lines if answer is None else [asking.answer_text(answer, state), *lines]:
            console().say(line)
    raise typer.Exit(EXIT_CODES[answer.outcome] if answer else 0)
