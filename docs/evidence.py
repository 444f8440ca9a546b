"""Writes docs/evidence.md's results and docs/evidence/*/README.md from all recipes/evidence/ that have run.

python docs/evidence.py         # from the records committed in docs/evidence/*/
python docs/evidence.py runs    # record the judged experiments in runs/ first
"""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from abrun.errors import AbrunError, ComparisonError
from abrun.logs.recorded.stored import load_experiment
from abrun.messages import sentence
from abrun.recipe.experiment import BASELINE, load_recipe, parse_stored_recipe, parse_stored_run
from abrun.recipe.reading import dotted
from abrun.recipe.run import can_change_numbers
from abrun.report.comparing import freeze_arm
from abrun.report.context import make_context
from abrun.report.injected import sensitivity_rows
from abrun.report.present.figures import COLORS, figure_style, save_figure
from abrun.report.present.tables import escape_markdown
from abrun.report.write import claim_cells
from abrun.runs.experiment import open_experiment
from abrun.runs.files import read_json, write_file, write_json
from abrun.runs.layout import REPORT
from abrun.runs.rundir import RunDir
from abrun.verdict.evidence import Evidence
from abrun.verdict.results import ClaimResult
from abrun.verdict.verdict_file import VerdictFile, as_json, parse_verdict_file, read_verdict_file

ROOT = Path(__file__).parents[1]
RECIPES, FOLDER, PAGE = "recipes/evidence", "docs/evidence", "docs/evidence.md"
BEGIN = "## Results\n"  # the rest of the page is generated
RECORD, VERDICT, REFERENCE, DETAILS = "record.json", "verdict.json", "reference.json", "README.md"
PUBLIC = 0o644
NUM_COLORS = 64  # enough for lines and bands
ROUNDING = 1e-6  # mean distance caused by float32 rounding of values near 1
FAR = 2.0  # in sd over seeds; different seeds are 1.1 to 1.4 sd apart (more with fewer seeds)
# In a recipe's comment: what others claimed of one arm or of all, and the verdict that would agree.
CLAIMED = r"Claimed elsewhere(?: of (\S+))?: (.+?)(?:, which would be a (\w+) here)?\."
COLUMNS = ("experiment", "claim", "claimed elsewhere", "difference [90 % interval]", "verdict")
FIGURE = "images/evidence"
WIDTH_INCHES, REACH = 7.4, 2.2  # REACH: of the figure, in margins
Record = Mapping[str, Any]


def write_record(directory: Path, recipe: Path, folder: Path) -> None:
    """Write everything that the results of a judged experiment are generated from."""
    judged = directory / REPORT / VERDICT
    if not judged.is_file():
        raise ComparisonError(f"{judged}: no such file; first: abrun compare {directory}")
    experiment, content, command = load_experiment(directory), _verdict(judged), _command(directory, recipe)
    context = make_context(experiment, content, command)
    runs = [*experiment.runs.values(), *experiment.controls.values()]
    hours = sum(_device_seconds(RunDir(Path(run.place))) for run in runs) / 3600
    num_finished = sum(run.status == "finished" for run in runs)
    unfinished = f" of {len(runs)}" * (num_finished < len(runs))
    record = {  # facts that are not in the verdict file
        "command": command,
        "ran": context.time_range or "unknown",
        "hardware": context.environment or "unknown",
        "spent": f"{f'{hours:.2g}' if hours else 'unknown'} GPU hours, {num_finished}{unfinished} runs",
        "seeds": list(experiment.arm(BASELINE)),
        "no_reference": None,
    }
    if (folder / RECORD).is_file():  # a sentence on the completions, written by hand
        record |= {key: text for key, text in read_json(folder / RECORD).items() if key == "learned"}
    try:
        freeze_arm(experiment, BASELINE, folder / REFERENCE)
    except ComparisonError as error:
        (folder / REFERENCE).unlink(missing_ok=True)  # left by an earlier run
        record["no_reference"] = str(error)
    write_json(folder / VERDICT, as_json(content), mode=PUBLIC)
    write_json(folder / RECORD, record, mode=PUBLIC)
    for path in folder.glob("*.png"):
        path.unlink()  # left by an earlier run
    for path in (directory / REPORT).glob("train-*.png"):
        image = Image.open(path).convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
        image.save(folder / path.name, optimize=True)


def _device_seconds(run: RunDir) -> float:
    """Return the seconds of a run's attempts, times its devices; 0 if it never started."""
    if not run.exists:
        return 0.0
    config = parse_stored_run(run.record().config)
    num_devices = config.cluster.nodes * config.devices_per_node / config.cluster.runs_per_gpu
    times = [(attempt.started_s, attempt.ended_s) for attempt in run.attempts()]
    return num_devices * sum(end - start for start, end in times if start is not None and end is not None)


def _verdict(path: Path) -> VerdictFile:
    """Return the content of a verdict file with host names replaced by numbers."""
    content = as_json(read_verdict_file(path))
    hosts = {host for group in content["environments"] for host in group["environment"].pop("hosts", ())}
    text = json.dumps(content)
    for number, host in enumerate(sorted(hosts), 1):
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", f"host-{number}", text)
    return parse_verdict_file(json.loads(text), path)


def _command(directory: Path, recipe: Path) -> str:
    """Return the launch command: the recipe, and --set for each value that differed. Paths become FOLDER."""
    ran = dotted(parse_stored_recipe(open_experiment(directory)["recipe"]).model_dump(mode="json"))
    written = dotted(load_recipe(recipe).model_dump(mode="json"))
    words = ["abrun", "launch", f"{RECIPES}/{recipe.name}"]
    for key, value in ran.items():
        if can_change_numbers(key) and (key not in written or written[key] != value):
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--set", f"{key}={'FOLDER' if text.startswith('/') else text}"]
    return shlex.join(words)


def recipes_of(root: Path) -> list[Path]:
    """Return all recipes of the page, run or not."""
    return sorted((root / RECIPES).glob("*.yaml"))


def paragraphs(recipe: Path) -> list[str]:
    """Return the paragraphs of a recipe's leading comment, without its launch command."""
    comment = takewhile(lambda line: line.startswith("#"), recipe.read_text().splitlines())
    text = "\n".join(line.removeprefix("#").strip() for line in comment)
    blocks = (block for block in re.split(r"\n\n+", text) if not re.search(r"^abrun ", block, re.MULTILINE))
    return [" ".join(block.split()) for block in blocks if block.strip()]


def claimed(recipe: Path) -> list[tuple[str | None, str, str | None]]:
    """Return (arm or None for all, claim made elsewhere, verdict that would agree with it or None)."""
    matches = (re.fullmatch(CLAIMED, text) for text in paragraphs(recipe))
    return [(match[1], match[2], match[3]) for match in matches if match]


def pages(root: Path) -> dict[str, str]:
    """Return {path: whole text}: docs/evidence.md, its introduction as it is, and each experiment's page."""
    introduction = (root / PAGE).read_text().partition(BEGIN)[0]
    rows: list[list[str]] = []
    texts: dict[str, str] = {}
    missing: list[str] = []
    for recipe in recipes_of(root):
        folder = root / FOLDER / recipe.stem
        if not (folder / RECORD).is_file():
            missing.append(f"`{recipe.stem}`")
            continue
        record, content = read_json(folder / RECORD), _verdict(folder / VERDICT)
        rows += _rows(recipe, content)
        details = f"# {recipe.stem}\n\n{_details(recipe, folder, record, content)}"
        texts[f"{FOLDER}/{recipe.stem}/{DETAILS}"] = details
    not_run = f"Not run yet: {', '.join(missing)}.\n" if missing else ""
    picture = f"![The interval of each claim against its margin]({FIGURE}.png)\n" if texts else ""
    parts = [f"{introduction}{BEGIN}\n{_table(COLUMNS, rows)}", picture, not_run]
    return {PAGE: "\n".join(part for part in parts if part), **texts}


def judged_claims(root: Path) -> Iterator[tuple[str, ClaimResult]]:
    """Yield all claims of experiments that have run, with the experiment, and its arm if it has several."""
    for recipe in recipes_of(root):
        if (root / FOLDER / recipe.stem / RECORD).is_file():
            content = _verdict(root / FOLDER / recipe.stem / VERDICT)
            for claim in content.claims:
                arm = f", {claim.arm}" if len(content.arms) > 1 else ""
                yield f"{recipe.stem.removeprefix('smollm2-')}{arm}", claim


def draw_claims(claims: Sequence[tuple[str, ClaimResult]]) -> Figure:
    """Draw the interval of each claim in units of its margin; of a ratio, in units of its limit."""
    figure = Figure(figsize=(WIDTH_INCHES, 0.8 + 0.3 * len(claims)), layout="constrained")
    ax = figure.subplots()
    ax.axvspan(-1, 1, color="#dafbe1", linewidth=0)
    ax.axvline(0, color="black", linewidth=0.8)
    names = []
    for row, (name, claim) in enumerate(claims):
        ends = _in_margins(claim)
        color = COLORS[1] if claim.result == "different" else COLORS[0]
        if ends is not None:
            ax.plot(ends, [row, row], color=color, linewidth=2, marker="|", markersize=9)
            middle = sum(ends) / 2
            if abs(middle) < REACH:
                ax.plot([middle], [row], "D", color=color, markersize=4)
            else:  # beyond the figure
                marker, edge = (">", REACH) if middle > 0 else ("<", -REACH)
                ax.plot([edge], [row], marker, color=color, markersize=7, clip_on=False)
        ax.annotate(claim.result, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        steps = claim_cells(claim)[1]
        names.append(f"{name}: {claim.claim.metric.removeprefix('train/')}, steps {steps}")
    ax.set_yticks(range(len(claims)), names, fontsize=8)
    ax.set_ylim(len(claims) - 0.5, -0.5)
    ax.set_xlim(-REACH, REACH)
    ax.set_xlabel("90 % interval in units of the margin, or of a ratio's limit")
    ax.grid(axis="y", visible=False)
    return figure


def _in_margins(claim: ClaimResult) -> tuple[float, float] | None:
    """Return the claim's interval in units of its margin, a ratio's in units of its limit."""
    estimate, terms = claim.estimate, claim.claim
    is_limit = estimate.limited is not None
    interval = estimate.limited_interval if is_limit else estimate.interval
    unit = terms.margin_number if is_limit else terms.margin
    return (interval[0] / unit, interval[1] / unit) if interval and unit else None


def _rows(recipe: Path, content: VerdictFile) -> Iterator[list[str]]:
    """Yield a row for each claim, or for each treatment without one."""
    prefix = _arm_prefixes(content)
    for arm in content.arms:
        claims = [claim for claim in content.claims if claim.arm == arm]
        verdict = prefix[arm] + _against(recipe, arm, content.arms[arm].verdict)
        theirs = next((text for named, text, _ in claimed(recipe) if named in (None, arm)), "")
        cells = [_claim_cells(claim) for claim in claims] or [["", ""]]
        for number, (claim, difference) in enumerate(cells):
            first = not number
            yield [
                f"[`{recipe.stem}`](evidence/{recipe.stem}/{DETAILS})" if first else "",
                claim,
                theirs if first else "",
                difference,
                escape_markdown(verdict) if first else "",
            ]


def _claim_cells(claim: ClaimResult) -> list[str]:
    metric, steps, _, difference, margin, _, _ = claim_cells(claim)
    return [escape_markdown(text) for text in (f"{metric}, steps {steps}: {margin}", difference)]


def _details(recipe: Path, folder: Path, record: Record, content: VerdictFile) -> str:
    """Return an experiment's claim, answer and certainty; then its figure, controls, cost and files."""
    statement = re.split(r"(?<=[.?]) ", paragraphs(recipe)[0].removeprefix("Claim: "))[0]
    prefix = _arm_prefixes(content)
    answers = "; ".join(
        prefix[arm] + _against(recipe, arm, content.arms[arm].verdict) for arm in content.arms
    )
    certain = [f"{prefix[claim.arm]}{_certainty(claim)}" for claim in content.claims]
    certain += [
        f"{prefix[check.arm]}{check['metric']} of the first step deviates by {check['deviation']:.2g}, above "
        f"{check['tolerance']:.2g}"
        for check in content.select("step one")
        if check.result == "fail"
    ]
    certain += [
        f"{prefix[guard.arm]}guard {guard['guard']}: {guard.result}, {guard['value']:.2g} (limit "
        f"{guard['limit']:g})"
        for guard in content.select("guard")
        if guard.result in ("open", "fail") and None not in (guard["value"], guard["limit"])
    ]
    sure = "; ".join(certain) or "no claim"
    rows = sensitivity_rows(content.select("injected fault"))
    injected = "; ".join(
        f"`{fault}`, not judged" if verdict == "INVALID" else f"`{fault}`, {verdict} ({caught})"
        for fault, _, verdict, caught, *_ in rows
    )
    injected = injected or "nothing"
    questions = "; ".join(_open_questions(content))
    open_text = f"Open: {questions}. " if questions else ""
    facts = (record["spent"], record["hardware"], record["ran"])
    images = [path.name for path in sorted(folder.glob("*.png"))]
    files = [name for name in (VERDICT, REFERENCE, *images[1:]) if (folder / name).is_file()]
    lines = [
        f"- Claim: {statement[0].upper()}{statement[1:]}",
        escape_markdown(f"- Answer: {answers}."),
        escape_markdown(f"- How sure (95 %, {len(record['seeds'])} seeds): {sure}."),
        "",
        *[f"![Curves]({name})" for name in images[:1]],
        "",
        f"`{record['command']}`: {escape_markdown(', '.join(facts))}. Injected: {injected}. {open_text}"
        f"{', '.join(f'[{file}]({file})' for file in files)}.",
    ]
    if record.get("learned"):
        lines += ["", record["learned"]]
    if record["no_reference"] is not None:
        lines += ["", escape_markdown(f"No reference: {record['no_reference']}.")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _certainty(claim: ClaimResult) -> str:
    """Return what is certain of a claim, and how many pairs would decide it if it is open."""
    _, steps, _, difference, margin, bound, _ = claim_cells(claim)
    metric, power = f"{claim.claim.metric}, steps {steps},", claim.power
    if claim.result == "equivalent":
        return f"{metric} differs by less than {bound} (margin {margin})"
    if claim.problem is not None:
        return f"{metric} is not tested: {sentence(claim.problem)}"
    if claim.result == "undecided" and power.pairs_needed is not None:
        needed = f"{power.pairs_needed} {'pairs' if claim.claim.num_pairs else 'runs of each arm'}"
        text = f"{metric} is open; {needed} decide it with 80 % power if the arms are equal"
        as_here = power.pairs_needed_observed
        return text if as_here is None else f"{text}, {as_here} if they differ as here"
    if claim.result == "undecided":
        return f"{metric} {margin}, is open: {difference}"
    return f"{metric} {margin}: {difference}"


def _open_questions(content: VerdictFile) -> Iterator[str]:
    """Yield what the verdict leaves open, as clauses."""
    prefix, claims = _arm_prefixes(content), content.claims
    for claim in claims:
        if claim.warnings:
            yield f"skewed differences of {prefix[claim.arm]}`{claim.claim.metric}`"
    checks = content.select("step one")
    untested = [check for check in checks if check.result in ("not tested", "open")]
    if untested:
        names = (f"{prefix[check.arm]}`{check['metric']}`" for check in untested)
        yield f"step one of {', '.join(names)}"
    rows = content.select("divergence")
    distant = {f"`{row['metric']}`": None for row in rows if _is_distant(row, claims)}
    if distant:
        yield f"far apart without a claim: {', '.join(distant)}"


def _is_distant(divergence: Evidence, claims: Sequence[ClaimResult]) -> bool:
    """Return whether a metric without a claim differs more between arms than between seeds."""
    claimed_metrics = {(claim.arm, claim.claim.metric) for claim in claims}
    share = divergence["share_of_seed_spread"] or 0
    is_claimed = (divergence.arm, divergence["metric"]) in claimed_metrics
    return not is_claimed and share > FAR and divergence["mean_difference"] > ROUNDING


def _against(recipe: Path, arm: str, verdict: str) -> str:
    """Return the verdict and, if it is decided and a claim was made elsewhere, whether they agree."""
    expected = next(
        (agreeing for claim_arm, _, agreeing in claimed(recipe) if claim_arm in (None, arm)), None
    )
    if expected is None or verdict in ("INCONCLUSIVE", "INVALID"):
        return verdict
    return f"{verdict}, {'as' if verdict == expected else 'not as'} claimed"


def _arm_prefixes(content: VerdictFile) -> dict[str, str]:
    """Return the prefix of texts about each arm: its name if there are several, else empty."""
    return {arm: f"{arm}: " * (len(content.arms) > 1) for arm in content.arms}


def _table(head: Sequence[str], body: Iterable[Iterable[str]]) -> str:
    rows = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(arguments: Sequence[str]) -> int:
    """Write the pages; return exit code 2 if an experiment could not be recorded, with a line for each."""
    problems: list[str] = []
    for runs in map(Path, arguments):
        recipes = [
            recipe for recipe in recipes_of(ROOT) if (runs / recipe.stem / "experiment.json").is_file()
        ]
        if not recipes:
            problems.append(
                f"{runs}: no experiment of {RECIPES} in this folder; pass the folder that has them"
            )
        for recipe in recipes:
            try:
                write_record(runs / recipe.stem, recipe, ROOT / FOLDER / recipe.stem)
            except AbrunError as error:
                problems.append(str(error))
    for path, text in pages(ROOT).items():
        write_file(ROOT / path, text.encode(), mode=PUBLIC)
    claims = list(judged_claims(ROOT))
    if claims:
        with figure_style():
            save_figure(draw_claims(claims), ROOT / "docs" / FIGURE, ("png",))
    print("\n".join(problems), end="\n" * bool(problems), file=sys.stderr)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
