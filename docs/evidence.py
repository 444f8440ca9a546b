"""Writes a page of every recipe of recipes/evidence/ that has been run, and the table of docs/evidence.md.

python docs/evidence.py         # from what is committed in docs/evidence/*/
python docs/evidence.py runs    # first that, of the experiments in runs/ that were judged
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from PIL import Image

from abrun.errors import AbrunError, ComparisonError
from abrun.messages import sentence, sentences
from abrun.present.markdown import code_span, escape_markdown
from abrun.recipe.experiment import BASELINE, load_recipe, parse_stored_recipe
from abrun.recipe.reading import dotted
from abrun.recorded.experiment import RecordedExperiment
from abrun.recorded.stored import load_experiment
from abrun.report.comparing import REPORT, freeze_arm
from abrun.report.context import make_context
from abrun.report.evidence import evidence_lines
from abrun.report.injected import advice_lines, caught_sentence, sensitivity_columns, sensitivity_rows
from abrun.report.next_step import next_steps
from abrun.report.placeholders import RUNS_DIR
from abrun.report.write import claim_cells, claim_columns
from abrun.runs.experiment import open_experiment
from abrun.runs.files import read_json, write_file, write_json
from abrun.verdict.divergence import Divergence
from abrun.verdict.verdict_file import VerdictFile, as_json, parse_verdict_file, read_verdict_file, select_arm

ROOT = Path(__file__).parents[1]
RECIPES, PAGES, INDEX, SITE = "recipes/evidence", "docs/evidence", "docs/evidence.md", ".mkdocs.yml"
RECORD, VERDICT, REFERENCE = "record.json", "verdict.json", "reference.json"
OWN_FIGURES = ("claims", "overview")  # no metric's; earlier versions drew the second
PUBLIC = 0o644
NUM_COLORS = 64  # of a picture of lines and bands
ROUNDING = 1e-6  # a mean distance that float32 makes of what is about 1
FAR = 2.0  # sd over seeds: runs of unlike seeds lie 1.1 to 1.4 of them apart, the more the fewer seeds
# In a recipe's comment: what others said, of one arm or of all, and the verdict that would say so here.
CLAIMED = r"Claimed elsewhere(?: of (\S+))?: (.+?)(?:, which would be a (\w+) here)?\."
APART = """How far apart runs lie, as a mean over steps: a treatment from its baseline; the baseline from
itself, run again (A/A), and from first weights moved by one ULP; the baseline's seeds (their sd). Where the
baseline repeats bit for bit, the last column says from which step on the arms differ."""
OF_METRICS = ("metric", "arms", "A/A", "one ULP", "seeds", "apart from step")
Record = Mapping[str, Any]


def write_record(directory: Path, recipe: Path, folder: Path) -> None:
    """Of an experiment that was judged, all that its page is made of."""
    judged = directory / REPORT / VERDICT
    if not judged.is_file():
        raise ComparisonError(f"{judged}: no such file; first: abrun compare {directory}")
    experiment, content, command = load_experiment(directory), _verdict(judged), _command(directory, recipe)
    beside = make_context(experiment, content, command)
    runs = [*experiment.runs.values(), *experiment.controls.values()]
    hours = sum(float("nan") if run.device_s is None else run.device_s for run in runs) / 3600
    kept = beside.completions and asdict(beside.completions)
    record = {  # what a page says that its verdict file, reference and pictures do not
        "command": command,
        "ran": beside.time_range or "unknown",
        "hardware": beside.environment or "unknown",
        "spent": f"{hours:.2g} run hours, {len(runs)} runs".replace("nan", "unknown"),
        "seeds": list(experiment.arm(BASELINE)),
        "next_steps": {arm: _next_steps(experiment, content, arm, command) for arm in content.arms},
        "completions": kept and {**kept, "steps": kept["steps"][:1] + kept["steps"][1:][-1:]},
        "no_reference": None,
    }
    try:
        freeze_arm(experiment, BASELINE, folder / REFERENCE)
    except ComparisonError as error:
        (folder / REFERENCE).unlink(missing_ok=True)  # of an earlier run
        record["no_reference"] = str(error)
    write_json(folder / VERDICT, as_json(content), mode=PUBLIC)
    write_json(folder / RECORD, record, mode=PUBLIC)
    for path in folder.glob("*.png"):
        path.unlink()  # of an earlier run
    for path in (directory / REPORT).glob("*.png"):
        image = Image.open(path).convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
        image.save(folder / path.name, optimize=True)


def _verdict(path: Path) -> VerdictFile:
    """Its content, without the names of hosts."""
    content = as_json(read_verdict_file(path))
    hosts = {host for one in content["environments"] for host in one["environment"].pop("hosts", ())}
    text = json.dumps(content)
    for number, host in enumerate(sorted(hosts), 1):
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", f"host-{number}", text)
    return parse_verdict_file(json.loads(text), path)


def _next_steps(
    experiment: RecordedExperiment, content: VerdictFile, arm: str, command: str
) -> list[dict[str, str]]:
    """As if there were no other treatment."""
    nobodys = RUNS_DIR / experiment.name  # no one's own folder
    alone = replace(experiment, arms=(BASELINE, arm), directory=nobodys)
    found = next_steps(alone, select_arm(content, arm), command)
    return [one.as_json() for one in found]


def _command(directory: Path, recipe: Path) -> str:
    """What launches it: the recipe, and what it was told to do otherwise. A folder is whoever's it is."""
    ran = dotted(parse_stored_recipe(open_experiment(directory)["recipe"]).model_dump(mode="json"))
    written = dotted(load_recipe(recipe).model_dump(mode="json"))
    words = ["abrun", "launch", f"{RECIPES}/{recipe.name}"]
    for key, value in ran.items():
        if key not in written or written[key] != value:
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--set", f"{key}={'FOLDER' if text.startswith('/') else text}"]
    return shlex.join(words)


def recipes_of(root: Path) -> list[Path]:
    """Those that have a page, or a line that says that they have not been run."""
    return sorted((root / RECIPES).glob("*.yaml"))


def paragraphs(recipe: Path) -> list[str]:
    """Of a recipe's leading comment, without the command that launches it: the page has what was run."""
    comment = takewhile(lambda line: line.startswith("#"), recipe.read_text().splitlines())
    text = "\n".join(line.removeprefix("#").strip() for line in comment)
    parts = (part for part in re.split(r"\n\n+", text) if not re.search(r"^abrun ", part, re.MULTILINE))
    return [" ".join(part.split()) for part in parts if part.strip()]


def claimed(recipe: Path) -> list[tuple[str | None, str, str | None]]:
    """Of an arm (None: of all) what others said, and the verdict that would say so here, if they did."""
    return [(one[1], one[2], one[3]) for text in paragraphs(recipe) if (one := re.fullmatch(CLAIMED, text))]


def pages(root: Path) -> dict[str, str]:
    """Every file that is written from the records, by its path."""
    written: dict[str, str] = {}
    index = ""
    for recipe in recipes_of(root):
        name, folder = recipe.stem, root / PAGES / recipe.stem
        they = "<br>".join(f"{arm}: {text}" if arm else text for arm, text, _ in claimed(recipe)) or "-"
        row = [name, they, "not run yet", "-", "-", "-", "-", "-"]
        if (folder / RECORD).is_file():
            record, content = read_json(folder / RECORD), _verdict(folder / VERDICT)
            written[f"{PAGES}/{name}.md"] = _page(recipe, folder, record, content)
            row = [f"[{name}](evidence/{name}.md)", they, *_row(recipe, record, content)]
        index += f"| {' | '.join(row)} |\n"
    entries = "".join(f"      - {Path(path).stem}: evidence/{Path(path).name}\n" for path in written)
    for path, above, lines in (
        (INDEX, r"\| experiment .*\n.*\n", index),
        (SITE, r"- All experiments: .*\n", entries),
    ):
        text, made = (root / path).read_text(), lines.replace("\\", r"\\")
        written[path] = re.sub(rf"({above})(?:\| .*\n|      - .*\n)*", rf"\g<1>{made}", text)
    return written


def _row(recipe: Path, record: Record, content: VerdictFile) -> Iterator[str]:
    """Of the index, from the verdict on."""
    of, claims, injected = _of(content), content.claims, content.sensitivity
    undecided = [one for one in claims if one.result == "undecided"]
    needed = [one.power.pairs_needed for one in undecided if one.power.pairs_needed is not None]
    yield _lines(of[arm] + _against(recipe, arm, one.verdict) for arm, one in content.arms.items())
    yield _lines(of[one.arm] + "{0} {4}: {3}, bound {5}, {6}".format(*claim_cells(one)) for one in claims)
    known = needed and len(needed) == len(undecided)
    decide = f"; {max(needed)} decide it with 80 % power, if equal" if known else ""
    yield f"{len(record['seeds'])}{decide}"
    yield (
        _lines(f"{one[0]}: {one[2]} ({one[3]})" for one in (sensitivity_rows(injected) if injected else ()))
        or "none"
    )
    yield _lines((record["hardware"], record["ran"]))
    yield record["spent"]


def _page(recipe: Path, folder: Path, record: Record, content: VerdictFile) -> str:
    name, arms, of, injected = recipe.stem, content.arms, _of(content), content.sensitivity
    paired = content.paired
    files = ", ".join(f"[{one}]({name}/{one})" for one in (VERDICT, REFERENCE) if (folder / one).is_file())
    repeated = f"abrun compare {name} --reference {PAGES}/{name}/{REFERENCE}    # yours with these"
    if record["no_reference"] is not None:
        repeated = f"# no reference to compare yours with: {record['no_reference']}"
    facts = (
        ("recipe", f"`{RECIPES}/{recipe.name}`"),
        ("hardware", escape_markdown(record["hardware"])),
        ("ran", record["ran"]),
        ("spent", f"{record['spent']}: the wall time of each, whether or not others shared its devices"),
        ("seeds", ", ".join(map(str, record["seeds"]))),
        ("files", files),
    )
    distances = [_distances(one, of) for one in content.divergence]
    claims = [[one.arm, *claim_cells(one)] for one in content.claims]
    pictures = sorted(folder.glob("*.png"), key=lambda path: (path.stem in OWN_FIGURES, path.stem))
    parts = [
        f"# {name}: {', '.join(of[arm] + one.verdict for arm, one in arms.items())}",
        "Written by `python docs/evidence.py`. All experiments, and what has to be known of their runs: "
        "[evidence.md](../evidence.md).",
        *paragraphs(recipe),
        _table(("", ""), facts, cell=str),
        f"```sh\n{record['command']}\n{repeated}\n```",
        "## Verdict",
        _list(of[arm] + sentence(reason) for arm, one in arms.items() for reason in one.reasons),
        _table(["arm", *claim_columns(content)], claims) if claims else "",
        *(f"![{path.stem} by arm]({name}/{path.name})" for path in pictures),
        *(part for arm in arms for part in _open(recipe, record, content, arm)),
        "## What it leaves open",
        _list([*_uneven(content, of), *_unclaimed(content, of), *sentences(content.not_tested)]),
        "## What it rests on",
        _table(("", ""), evidence_lines(replace(content, sensitivity=None, not_tested=[]))),  # said elsewhere
        *([APART, _table(OF_METRICS, distances)] if distances else []),
        "## Positive control",
        "Each injected in the baseline and judged as a treatment is: it "
        f"{escape_markdown(caught_sentence(injected, paired=paired))}."
        if injected
        else "No fault was injected beside it: nothing says what this experiment could have found.",
        _table(sensitivity_columns(paired=paired), sensitivity_rows(injected)) if injected else "",
        _list(f"Not caught: {one}" for one in (advice_lines(injected) if injected else ())),
        "## What the arms said",
        *_completions(record["completions"], [BASELINE, *arms]),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _open(recipe: Path, record: Record, content: VerdictFile, arm: str) -> Iterator[str]:
    """What could be done next, where the verdict decides nothing or is not what was claimed."""
    said = _against(recipe, arm, content.arms[arm].verdict)
    if said in ("INCONCLUSIVE", "INVALID") or "not as" in said:
        yield f"{arm}: {said}, for the reasons above. What could be done next:"
        steps = record["next_steps"][arm]
        yield "\n".join(f"- {escape_markdown(step['text'])}: {code_span(step['command'])}" for step in steps)


def _uneven(content: VerdictFile, of: Mapping[str, str]) -> Iterator[str]:
    """The differences of a claim that are skewed, as where one seed alone fails."""
    for one in content.claims:
        if one.warnings and one.estimate.differences:
            pairs = zip(one.claim.seeds, one.estimate.differences, strict=True)
            by_seed = ", ".join(f"{difference:+.2g} in seed {seed}" for seed, difference in pairs)
            yield f"{of[one.arm]}{one.claim.metric}: the mean difference is no seed's own: {by_seed}"


def _unclaimed(content: VerdictFile, of: Mapping[str, str]) -> Iterator[str]:
    """What no claim is about, and is further apart than other seeds would be."""
    claimed = {(one.arm, one.claim.metric) for one in content.claims}
    firsts = {
        (one.arm, one.metric): (
            f"; at step {one.step}, in seed {one.seed}, {one.treatment:.4g} for {one.baseline:.4g}"
        )
        for one in content.step_one
    }
    for one in content.divergence:
        arm, metric, share = one.arm, one.metric, one.share_of_seed_spread or 0
        if (arm, metric) not in claimed and share > FAR and one.mean_difference > ROUNDING:
            far = f"{share:.2g} times the seeds' sd from the baseline on average"
            yield f"{of[arm]}{metric}: no claim; {far}{firsts.get((arm, metric), '')}"


def _distances(one: Divergence, of: Mapping[str, str]) -> list[str]:
    ulp = one.ulp.mean_difference if one.ulp else None
    means = (one.mean_difference, one.aa_mean_difference, ulp, one.seed_spread)
    numbers = ("-" if mean is None else f"{mean:.3g}" for mean in means)
    return [of[one.arm] + one.metric, *numbers, str(one.first_step_apart or "-")]


def _completions(kept: Record | None, arms: Sequence[str]) -> Iterator[str]:
    if not (kept and kept["steps"]):
        yield escape_markdown(kept["problem"] if kept and kept["problem"] else "No completions were kept.")
        return
    for step, prompts in kept["steps"]:
        yield f"Step {step}, seed {kept['seed']}:"
        cells = ([_text(one["prompt"]), *map(_completion, one["said"])] for one in prompts)
        said = [arm for index, arm in enumerate(arms) if index in kept["arms"]]
        yield _table(["prompt", *said], cells, cell=str)


def _completion(said: Record | None) -> str:
    return f"{_text(said['text'])}<br>*reward {said['reward']}*" if said else "not kept"


def _text(text: str) -> str:
    return _lines(text.strip().splitlines()) or "(nothing)"


def _against(recipe: Path, arm: str, verdict: str) -> str:
    """The verdict, and whether it is what was claimed, where something was and the verdict decides."""
    expected = next((verdict for of, _, verdict in claimed(recipe) if of in (None, arm)), None)
    if expected is None or verdict in ("INCONCLUSIVE", "INVALID"):
        return verdict
    return f"{verdict}, {'as' if verdict == expected else 'not as'} claimed elsewhere"


def _of(content: VerdictFile) -> dict[str, str]:
    """Before what is said of one of several treatments, its name."""
    return {arm: f"{arm}: " * (len(content.arms) > 1) for arm in content.arms}


def _lines(texts: Iterable[str]) -> str:
    return "<br>".join(map(escape_markdown, texts))


def _list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {escape_markdown(text)}" for text in texts)


def _table(
    head: Sequence[str], body: Iterable[Iterable[str]], cell: Callable[[str], str] = escape_markdown
) -> str:
    cells = [head, ["---"] * len(head), *(map(cell, row) for row in body)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def main(arguments: Sequence[str]) -> int:
    """Exit code 2 where something could not be recorded, with a line on each; all else is written."""
    problems: list[str] = []
    for runs in map(Path, arguments):
        found = [recipe for recipe in recipes_of(ROOT) if (runs / recipe.stem / "experiment.json").is_file()]
        problems += [] if found else [f"{runs}: got no experiment of {RECIPES}; name the folder of them"]
        for recipe in found:
            try:
                write_record(runs / recipe.stem, recipe, ROOT / PAGES / recipe.stem)
            except AbrunError as error:
                problems.append(str(error))
    for path, text in pages(ROOT).items():
        write_file(ROOT / path, text.encode(), mode=PUBLIC)
    print("\n".join(problems), end="\n" * bool(problems), file=sys.stderr)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
