"""The command `abrun gate`. Slow imports happen inside it."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from abrun.cli.app import console, make_group, print_json, survive_output_errors
from abrun.cli.arguments import Json, reads_runs, refuse_options, typed_command
from abrun.errors import RecipeError
from abrun.messages import sentences

if TYPE_CHECKING:
    from abrun.logs.recorded.sources import ReadingOptions

# BETTER is the only answer to keep a candidate by; the incumbent itself has been kept
EXIT_CODES = {"BETTER": 0, "INCUMBENT": 0, "WORSE": 3, "OPEN": 4, "ALIKE": 6}

Store = Annotated[
    Path | None,
    typer.Option("--against", metavar="STORE", help="File of runs and answers, which each call extends."),
]
Candidate = Annotated[
    str | None,
    typer.Argument(
        metavar="CANDIDATE", help="Runs of one arm, as for abrun compare; default: show the store."
    ),
]
Control = Annotated[
    str | None,
    typer.Option(metavar="ARM", help="Fresh runs of the incumbent: an arm of CANDIDATE, of the same seeds."),
]
OldRuns = Annotated[bool, typer.Option("--old-runs", help="Judge by the incumbent's earlier runs alone.")]
Audit = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="Score another acceptance rule, such as './accept.sh {runs}', on an experiment instead.",
    ),
]
RoundOf = Annotated[
    Path | None,
    typer.Option(
        "--round",
        metavar="RECIPE",
        help="Launch the next round first, with new seeds; the baseline is the incumbent.",
    ),
]
StartIt = Annotated[
    bool, typer.Option("--start", help="Write a new store, with CANDIDATE as the first incumbent.")
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
        help="With --start: the improvement that must not be missed, which plans the pairs; ALIKE rules it "
        "out. A number in the metric's unit, or standard deviations of a run. Default: '2 sigma'."
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
@reads_runs
def gate(
    candidate: Candidate = None,
    against: Store = None,
    round_of: RoundOf = None,
    control: Control = None,
    old_runs: OldRuns = False,
    audit: Audit = None,
    start: StartIt = False,
    claim: GateClaim = None,
    worth: Worth = None,
    alpha: Alpha = None,
    arm: Annotated[str | None, typer.Option(help="Arm to judge, if there are several.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the candidate in the store; default: its folder's.")
    ] = None,
    as_json: Json = False,
    *,
    reading: "ReadingOptions",
) -> None:
    """Keep or discard many candidates, at a false discovery rate.

    A round runs the candidate beside the incumbent, on the same seeds and machines; only these pairs keep a
    candidate. The answer is BETTER (the candidate becomes the incumbent), WORSE, ALIKE (no improvement worth
    finding), or OPEN with the pairs to add; the level of the test (LORD++) pays for all readings. BETTER
    needs 3 pairs. Copies are refused, a failed run is WORSE, and no run is taken back.

    Exit code: 0 BETTER, 3 WORSE, 4 OPEN, 6 ALIKE; 2 for bad input.

    Examples:
        abrun gate runs/base --against gate.jsonl --start --claim 'train/reward:last 20%:better 0'
        abrun gate --round idea.yaml --against gate.jsonl --json
        abrun gate runs/round-7 --arm idea --control base --against gate.jsonl
        abrun gate quickstart-sensitivity --audit './accept.sh {runs}'
    """
    if not start:
        refuse_options({"--claim": claim, "--worth": worth, "--alpha": alpha}, needed="--start")
    if audit is not None:
        refused = {"--against": against, "--round": round_of, "--control": control, "--start": start}
        refused |= {"--arm": arm, "--name": name, "--old-runs": old_runs}
        refuse_options(refused, "--audit: got {option} as well; drop it")
        _audit(audit, candidate, reading, as_json=as_json)
    if start:
        refuse_options({"--control": control, "--old-runs": old_runs}, "--start: got {option}; drop it")
    elif candidate is None and round_of is None:
        shown = {"--arm": arm, "--name": name, "--control": control, "--old-runs": old_runs}
        refuse_options(shown, "{option}: got no CANDIDATE; add it, or drop {option}")
    if against is None:
        raise RecipeError("gate: got no store; give --against STORE, which --start writes")
    _ask(
        against,
        {"path": candidate or "", "arm": arm, "name": name, "control": control, "old_runs": old_runs},
        {"claim": claim, "worth": worth, "alpha": alpha} if start else {},
        round_of,
        reading=reading,
        as_json=as_json,
    )


def _ask(
    against: Path,
    fields: dict[str, Any],  # of a Source
    starting: dict[str, Any],  # options of a new store; empty: of an existing one
    round_of: Path | None,
    *,
    reading: "ReadingOptions",
    as_json: bool,
) -> NoReturn:
    """Start the store, ask it, or show it, and exit with the answer's code."""
    from abrun.messages.records import encode_reasons
    from abrun.recipe.claims import parse_claim
    from abrun.tools.drift import gate as asking
    from abrun.tools.drift.rounds import launch_round
    from abrun.tools.drift.store import read_state

    # One folder may hold the candidate and its control
    one_arm = replace(reading, allows_one_arm=True)
    source, answer, reasons = asking.Source(reading=one_arm, **fields), None, []
    if round_of is not None:
        refused = {
            "CANDIDATE": source.path or None,
            "--control": source.control,
            "--old-runs": source.old_runs,
        }
        refuse_options({**refused, "--start": bool(starting)}, "--round: got {option} as well; drop it")
        source = launch_round(against, round_of, source, quiet=as_json)
    if starting:
        missing = {"CANDIDATE": source.path, "--claim": starting["claim"]}
        if absent := [option for option, value in missing.items() if not value]:
            raise RecipeError(f"--start requires {absent[0]}; add it")
        options = {**starting, "claim": parse_claim(starting["claim"])}
        state, reasons = asking.start_gate(against, source, **options)
    elif source.path:
        answer, state, reasons = asking.ask_gate(against, source)
    else:
        state = read_state(against)
    lines = sentences(reasons)
    if as_json:
        content = asking.as_json(answer, state)
        steps = []
        if answer and answer.seeds_to_add:
            text = asking.answer_text(answer, state)
            steps = [{"text": text, "command": typed_command(), "argv": ["abrun", *sys.argv[1:]]}]
        notes = {"notes": lines, "note_codes": encode_reasons(reasons)}
        print_json({**content, **notes, "next": steps})
    else:
        if answer is None:
            console().print(asking.render_state(state))
        for line in lines if answer is None else [asking.answer_text(answer, state), *lines]:
            console().say(line)
    raise typer.Exit(EXIT_CODES[answer.outcome] if answer else 0)


def _audit(command: str, source: str | None, reading: "ReadingOptions", *, as_json: bool) -> NoReturn:
    """Score an acceptance rule and exit with 0, whatever it scores."""
    from abrun.tools.drift.audit import audit_rule, render_scores, summary_text

    if source is None:
        raise RecipeError("--audit: got no runs; give an experiment, such as that of abrun faults run")
    scores = audit_rule(command, source, replace(reading, allows_one_arm=True))
    if as_json:
        print_json({"summary": summary_text(scores), "arms": list(map(asdict, scores)), "next": []})
    else:
        console().print(render_scores(scores))
        console().say(summary_text(scores))
    raise typer.Exit(0)
