"""Generator of a page for every recipe in recipes/evidence/ that has run, and of the table of all.

python docs/evidence.py         # from the records committed in docs/evidence/*/
python docs/evidence.py runs    # record the judged experiments in runs/ first
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
SUMMARY_FIGURES = ("claims", "overview")  # not of one metric; only earlier versions drew "overview"
PUBLIC = 0o644
NUM_COLORS = 64  # enough for lines and bands
ROUNDING = 1e-6  # mean distance caused by float32 rounding of values near 1
FAR = 2.0  # in sd over seeds; different seeds are 1.1 to 1.4 sd apart (more with fewer seeds)
# In a recipe's comment: what others claimed of one arm or of all, and the verdict that would agree.
CLAIMED = r"Claimed elsewhere(?: of (\S+))?: (.+?)(?:, which would be a (\w+) here)?\."
APART = """Mean distance over steps: between a treatment and its baseline (arms), between the baseline and its
rerun (A/A), between the baseline and a rerun with initial weights moved by one ULP, and the sd over the
baseline's seeds. If reruns are bit-identical, the last column is the first step at which the arms differ."""
DISTANCE_COLUMNS = ("metric", "arms", "A/A", "one ULP", "seeds", "first different step")
Record = Mapping[str, Any]


def write_record(directory: Path, recipe: Path, folder: Path) -> None:
    """Write everything that the page of a judged experiment is generated from."""
    judged = directory / REPORT / VERDICT
    if not judged.is_file():
        raise ComparisonError(f"{judged}: no such file; first: abrun compare {directory}")
    experiment, content, command = load_experiment(directory), _verdict(judged), _command(directory, recipe)
    context = make_context(experiment, content, command)
    runs = [*experiment.runs.values(), *experiment.controls.values()]
    hours = sum(float("nan") if run.device_s is None else run.device_s for run in runs) / 3600
    completions = context.completions and asdict(context.completions)
    record = {  # facts of the page that are not in its verdict file, reference or pictures
        "command": command,
        "ran": context.time_range or "unknown",
        "hardware": context.environment or "unknown",
        "spent": f"{hours:.2g} run hours, {len(runs)} runs".replace("nan", "unknown"),
        "seeds": list(experiment.arm(BASELINE)),
        "next_steps": {arm: _next_steps(experiment, content, arm, command) for arm in content.arms},
        "completions": completions
        and {**completions, "steps": completions["steps"][:1] + completions["steps"][1:][-1:]},
        "no_reference": None,
    }
    try:
        freeze_arm(experiment, BASELINE, folder / REFERENCE)
    except ComparisonError as error:
        (folder / REFERENCE).unlink(missing_ok=True)  # left by an earlier run
        record["no_reference"] = str(error)
    write_json(folder / VERDICT, as_json(content), mode=PUBLIC)
    write_json(folder / RECORD, record, mode=PUBLIC)
    for path in folder.glob("*.png"):
        path.unlink()  # left by an earlier run
    for path in (directory / REPORT).glob("*.png"):
        image = Image.open(path).convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
        image.save(folder / path.name, optimize=True)


def _verdict(path: Path) -> VerdictFile:
    """Return the content of a verdict file with host names replaced by numbers."""
    content = as_json(read_verdict_file(path))
    hosts = {host for group in content["environments"] for host in group["environment"].pop("hosts", ())}
    text = json.dumps(content)
    for number, host in enumerate(sorted(hosts), 1):
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", f"host-{number}", text)
    return parse_verdict_file(json.loads(text), path)


def _next_steps(
    experiment: RecordedExperiment, content: VerdictFile, arm: str, command: str
) -> list[dict[str, str]]:
    """Return the next steps for one treatment, as if it were the only one."""
    directory = RUNS_DIR / experiment.name  # a placeholder, so that no private path is published
    alone = replace(experiment, arms=(BASELINE, arm), directory=directory)
    return [step.as_json() for step in next_steps(alone, select_arm(content, arm), command)]


def _command(directory: Path, recipe: Path) -> str:
    """Return the launch command: the recipe, and --set for each value that differed. Paths become FOLDER."""
    ran = dotted(parse_stored_recipe(open_experiment(directory)["recipe"]).model_dump(mode="json"))
    written = dotted(load_recipe(recipe).model_dump(mode="json"))
    words = ["abrun", "launch", f"{RECIPES}/{recipe.name}"]
    for key, value in ran.items():
        if key not in written or written[key] != value:
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--set", f"{key}={'FOLDER' if text.startswith('/') else text}"]
    return shlex.join(words)


def recipes_of(root: Path) -> list[Path]:
    """Return all recipes of the index, run or not."""
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
    """Return the text of every generated file by its path."""
    written: dict[str, str] = {}
    index = ""
    for recipe in recipes_of(root):
        name, folder = recipe.stem, root / PAGES / recipe.stem
        claims = "<br>".join(f"{arm}: {text}" if arm else text for arm, text, _ in claimed(recipe)) or "-"
        row = [name, claims, "not run yet", "-", "-", "-", "-", "-"]
        if (folder / RECORD).is_file():
            record, content = read_json(folder / RECORD), _verdict(folder / VERDICT)
            written[f"{PAGES}/{name}.md"] = _page(recipe, folder, record, content)
            row = [f"[{name}](evidence/{name}.md)", claims, *_row(recipe, record, content)]
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
    """Yield the cells of a row of the index, from the verdict on."""
    prefix, claims, injected = _arm_prefixes(content), content.claims, content.sensitivity
    undecided = [claim for claim in claims if claim.result == "undecided"]
    needed = [claim.power.pairs_needed for claim in undecided if claim.power.pairs_needed is not None]
    yield _lines(prefix[arm] + _against(recipe, arm, judged.verdict) for arm, judged in content.arms.items())
    yield _lines(
        prefix[claim.arm] + "{0} {4}: {3}, bound {5}, {6}".format(*claim_cells(claim)) for claim in claims
    )
    is_known = needed and len(needed) == len(undecided)
    decide = f"; {max(needed)} decide it with 80 % power, if equal" if is_known else ""
    yield f"{len(record['seeds'])}{decide}"
    yield (
        _lines(f"{row[0]}: {row[2]} ({row[3]})" for row in (sensitivity_rows(injected) if injected else ()))
        or "none"
    )
    yield _lines((record["hardware"], record["ran"]))
    yield record["spent"]


def _page(recipe: Path, folder: Path, record: Record, content: VerdictFile) -> str:
    name, arms, prefix, injected = recipe.stem, content.arms, _arm_prefixes(content), content.sensitivity
    paired = content.paired
    files = ", ".join(
        f"[{file}]({name}/{file})" for file in (VERDICT, REFERENCE) if (folder / file).is_file()
    )
    repeated = f"abrun compare {name} --reference {PAGES}/{name}/{REFERENCE}    # your runs with these"
    if record["no_reference"] is not None:
        repeated = f"# no reference to compare your runs with: {record['no_reference']}"
    facts = (
        ("recipe", f"`{RECIPES}/{recipe.name}`"),
        ("hardware", escape_markdown(record["hardware"])),
        ("ran", record["ran"]),
        ("spent", f"{record['spent']} (wall time of each run, even if runs shared a device)"),
        ("seeds", ", ".join(map(str, record["seeds"]))),
        ("files", files),
    )
    distances = [_distances(divergence, prefix) for divergence in content.divergence]
    claims = [[claim.arm, *claim_cells(claim)] for claim in content.claims]
    pictures = sorted(folder.glob("*.png"), key=lambda path: (path.stem in SUMMARY_FIGURES, path.stem))
    blocks = [
        f"# {name}: {', '.join(prefix[arm] + judged.verdict for arm, judged in arms.items())}",
        "Generated by `python docs/evidence.py`. All experiments, with notes on their runs: "
        "[evidence.md](../evidence.md).",
        *paragraphs(recipe),
        _table(("", ""), facts, cell=str),
        f"```sh\n{record['command']}\n{repeated}\n```",
        "## Verdict",
        _list(prefix[arm] + sentence(reason) for arm, judged in arms.items() for reason in judged.reasons),
        _table(["arm", *claim_columns(content)], claims) if claims else "",
        *(f"![{path.stem} by arm]({name}/{path.name})" for path in pictures),
        *(block for arm in arms for block in _open(recipe, record, content, arm)),
        "## What is still open",
        _list(
            [
                *_skewed_claims(content, prefix),
                *_distant_metrics(content, prefix),
                *sentences(content.not_tested),
            ]
        ),
        "## Evidence",
        _table(
            ("", ""), evidence_lines(replace(content, sensitivity=None, not_tested=[]))
        ),  # in other sections
        *([APART, _table(DISTANCE_COLUMNS, distances)] if distances else []),
        "## Positive control",
        "Each fault is injected into the baseline and judged like a treatment: the comparison "
        f"{escape_markdown(caught_sentence(injected, paired=paired))}."
        if injected
        else "No fault was injected, so nothing shows what this experiment could have detected.",
        _table(sensitivity_columns(paired=paired), sensitivity_rows(injected)) if injected else "",
        _list(f"Not caught: {advice}" for advice in (advice_lines(injected) if injected else ())),
        "## Completions",
        *_completions(record["completions"], [BASELINE, *arms]),
    ]
    return "\n\n".join(block.rstrip("\n") for block in blocks if block) + "\n"


def _open(recipe: Path, record: Record, content: VerdictFile, arm: str) -> Iterator[str]:
    """Yield next steps if the verdict is undecided or contradicts the claim."""
    verdict = _against(recipe, arm, content.arms[arm].verdict)
    if verdict in ("INCONCLUSIVE", "INVALID") or "not as" in verdict:
        yield f"{arm}: {verdict}, for the reasons above. Next steps:"
        steps = record["next_steps"][arm]
        yield "\n".join(f"- {escape_markdown(step['text'])}: {code_span(step['command'])}" for step in steps)


def _skewed_claims(content: VerdictFile, prefix: Mapping[str, str]) -> Iterator[str]:
    """Yield the differences by seed of claims whose differences are skewed (such as one failing seed)."""
    for result in content.claims:
        if result.warnings and result.estimate.differences:
            pairs = zip(result.claim.seeds, result.estimate.differences, strict=True)
            by_seed = ", ".join(f"{difference:+.2g} in seed {seed}" for seed, difference in pairs)
            yield f"{prefix[result.arm]}{result.claim.metric}: the differences are skewed: {by_seed}"


def _distant_metrics(content: VerdictFile, prefix: Mapping[str, str]) -> Iterator[str]:
    """Yield the metrics without a claim whose arms differ more than different seeds would."""
    claimed = {(result.arm, result.claim.metric) for result in content.claims}
    first_steps = {
        (check.arm, check.metric): f"; at step {check.step}, in seed {check.seed}, "
        f"{check.treatment:.4g} instead of {check.baseline:.4g}"
        for check in content.step_one
    }
    for divergence in content.divergence:
        arm, metric, share = divergence.arm, divergence.metric, divergence.share_of_seed_spread or 0
        if (arm, metric) not in claimed and share > FAR and divergence.mean_difference > ROUNDING:
            far = f"on average {share:.2g} times the seeds' sd from the baseline"
            yield f"{prefix[arm]}{metric}: no claim; {far}{first_steps.get((arm, metric), '')}"


def _distances(divergence: Divergence, prefix: Mapping[str, str]) -> list[str]:
    ulp = divergence.ulp.mean_difference if divergence.ulp else None
    means = (divergence.mean_difference, divergence.aa_mean_difference, ulp, divergence.seed_spread)
    numbers = ("-" if mean is None else f"{mean:.3g}" for mean in means)
    return [prefix[divergence.arm] + divergence.metric, *numbers, str(divergence.first_step_apart or "-")]


def _completions(stored: Record | None, arms: Sequence[str]) -> Iterator[str]:
    if not (stored and stored["steps"]):
        yield escape_markdown(
            stored["problem"] if stored and stored["problem"] else "No completions were kept."
        )
        return
    for step, prompts in stored["steps"]:
        yield f"Step {step}, seed {stored['seed']}:"
        rows = ([_text(row["prompt"]), *map(_completion, row["completions"])] for row in prompts)
        shown_arms = [arm for index, arm in enumerate(arms) if index in stored["arms"]]
        yield _table(["prompt", *shown_arms], rows, cell=str)


def _completion(sample: Record | None) -> str:
    return f"{_text(sample['text'])}<br>*reward {sample['reward']}*" if sample else "not kept"


def _text(text: str) -> str:
    return _lines(text.strip().splitlines()) or "(nothing)"


def _against(recipe: Path, arm: str, verdict: str) -> str:
    """Return the verdict and, if it is decided and a claim was made elsewhere, whether they agree."""
    expected = next(
        (agreeing for claim_arm, _, agreeing in claimed(recipe) if claim_arm in (None, arm)), None
    )
    if expected is None or verdict in ("INCONCLUSIVE", "INVALID"):
        return verdict
    return f"{verdict}, {'as' if verdict == expected else 'not as'} claimed elsewhere"


def _arm_prefixes(content: VerdictFile) -> dict[str, str]:
    """Return the prefix of sentences about each arm: its name if there are several, else empty."""
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
    """Write all pages; return exit code 2 if an experiment could not be recorded, with a line for each."""
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
                write_record(runs / recipe.stem, recipe, ROOT / PAGES / recipe.stem)
            except AbrunError as error:
                problems.append(str(error))
    for path, text in pages(ROOT).items():
        write_file(ROOT / path, text.encode(), mode=PUBLIC)
    print("\n".join(problems), end="\n" * bool(problems), file=sys.stderr)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
