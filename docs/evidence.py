"""Writes docs/evidence.md, and a page for every recipe of recipes/evidence/ that has been run.

python docs/evidence.py         # all pages again, from docs/evidence/*/record.json
python docs/evidence.py runs    # first the records, pictures and references, of the experiments in runs/
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from evidence_record import (
    PUBLIC,
    RECIPES,
    RECORD,
    REFERENCE,
    VERDICT,
    Arm,
    Record,
    read_record,
    read_verdict,
    title,
    write_record,
)

from abrun.compare.show.evidence import evidence
from abrun.compare.show.markup import code, escaped, table_row
from abrun.compare.show.planted import COLUMNS
from abrun.errors import AbrunError, ComparisonError
from abrun.recipe import BASELINE, load_recipe
from abrun.store import write_file

ROOT = Path(__file__).parents[1]
INDEX, PAGES, SITE = "docs/evidence.md", "docs/evidence", ".mkdocs.yml"
MOST_CHARACTERS = 400  # of a prompt or completion in a table

# What the pull requests claimed, and the verdict that would say the same here (None: they claimed nothing),
# by what the experiment's name ends with, and of one of several treatments its arm's.
CLAIMED: dict[str, tuple[str, str | None]] = {
    "grpo-fused": (
        "step one equal, generation KL equal step for step, and less between the arms than between seeds",
        "MATCH",
    ),
    "sft-fused": ("the same curves", "MATCH"),
    "dpo-fused": ("the same curves", "MATCH"),
    "gspo-microbatches": ("identical", "MATCH"),
    "context-parallel": ("identical", "MATCH"),
    "fp32-head": ("`token_mult_prob_error` goes down", "MATCH"),
    "megatron-ppo": ("rewards side by side to the end", "MATCH"),
    "ppo-values: no-right-shift": (
        "reward 0.89 on GSM8K after 100 steps, and 0.79 without the shift "
        "([NeMo-RL 2837](https://github.com/NVIDIA-NeMo/RL/issues/2837))",
        "MISMATCH",
    ),
    "ppo-values: bfloat16-value-head": ("suspected of a difference; no figure", None),
    "vllm-engine": ("nothing", None),
    "levers": ("nothing", None),
}
HEAD = """# Evidence

Written by `python docs/evidence.py`, from the record of every experiment; a test compares the two.

Pull requests of NeMo-RL, SkyRL, Fast-LLM and torchtitan changed what the recipes below change, and said of
it what stands in the second column. Here each change is made again in abrun's own trainer, with a small
pretrained model, both arms over the same seeds, and judged by equivalence: a verdict, and the certified
bound, which is the smallest margin that would have passed. Model and task are not theirs, so that it is the
claim that is tested, and not their figures: "as claimed" means the verdict that their claim would have here.
GPU hours count a run's whole time, also where several shared a GPU. What was run is here, whatever came of
it.

MATCH: of every claim the 90 % interval of the paired difference lies inside its margin, which is less than
identical, and neither the first step nor a guard fails ([verdict.md](verdict.md)). It is said of this
recipe, these seeds and steps. Two controls run beside the arms: the baseline again (`controls.aa_reruns`),
which is the machine's noise, and the baseline with a fault planted on purpose (`controls.faults`), which has
to be a MISMATCH: it says what the experiment could have found, and where there is none, nothing does.

To repeat one on a GPU (`smollm2-context-parallel`: two; several GPUs share the runs among them), with the
model from the hub or, by `--set model.path=FOLDER`, from a folder:

```sh
abrun launch recipes/evidence/smollm2-grpo-fused.yaml --dry-run    # its runs, and what this machine lacks
abrun launch recipes/evidence/smollm2-grpo-fused.yaml
```
"""
OF_INDEX = ("experiment", "they claimed", "verdict", "claims: difference, certified bound", "seeds")
OF_INDEX += ("planted faults", "where and when", "GPU hours")
OF_METRICS = (
    "metric",
    "the arms",
    "the baseline again (A/A)",
    "from one ULP away",
    "the seeds",
    "apart from step",
)


def record_all(runs: Path, root: Path) -> list[Record]:
    """Of every recipe whose experiment is in `runs`; writes what its page is made of into docs/evidence/."""
    recipes = [path for path in recipes_of(root) if (runs / path.stem / "experiment.json").is_file()]
    if not recipes:
        raise ComparisonError(
            f"{runs}: got no experiment of {RECIPES}; expected is a folder named as a recipe, such as "
            f"{recipes_of(root)[0].stem}: launch one, or name the folder that holds them"
        )
    return [write_record(runs / path.stem, path, root / PAGES / path.stem) for path in recipes]


def recipes_of(root: Path) -> list[Path]:
    """Those that have a page, or a line that says that they have not been run."""
    return sorted((root / RECIPES).glob("*.yaml"))


def pages(root: Path) -> dict[str, str]:
    """Every file that is written from the records, by its path."""
    recipes = {path.stem: path for path in recipes_of(root)}
    records = {
        name: read_record(root / PAGES / name) for name in recipes if (root / PAGES / name / RECORD).is_file()
    }
    written = {
        f"{PAGES}/{name}.md": "\n".join(_page(one, recipes[name], root)) for name, one in records.items()
    }
    return {
        INDEX: "\n".join(_index(recipes, records)),
        SITE: _contents((root / SITE).read_text(), records),
        **written,
    }


def claim(recipe: Path) -> list[str]:
    """The paragraphs of a recipe's leading comment, with the commands in it as code."""
    comment = takewhile(lambda line: line.startswith("#"), recipe.read_text().splitlines())
    text = "\n".join(line.removeprefix("#").strip() for line in comment)
    text = re.sub(r"^abrun .*$", r"`\g<0>`", text, flags=re.MULTILINE)
    return [" ".join(part.split()) for part in re.split(r"\n\n+", text) if part.strip()]


def _index(recipes: Mapping[str, Path], records: Mapping[str, Record]) -> Iterator[str]:
    yield HEAD
    yield table_row(OF_INDEX)
    yield "|" + "---|" * len(OF_INDEX)
    for name, recipe in recipes.items():
        if name in records:
            yield from (f"| {' | '.join(_row(records[name], arm))} |" for arm in records[name].arms)
            continue
        treatments = [arm for arm in load_recipe(recipe).arms if arm != BASELINE]
        for arm in treatments:
            result = title(name, arm, treatments)
            yield f"| {result} | {claimed(result)[0]} | not run yet{' | -' * (len(OF_INDEX) - 3)} |"
    yield ""


def _row(record: Record, arm: Arm) -> Iterator[str]:
    yield f"[{arm.title}](evidence/{record.name}.md)"
    yield claimed(arm.title)[0]
    yield ", ".join(filter(None, (arm.verdict, _as_claimed(arm))))
    yield _lines(map(_in_short, arm.claims))
    yield str(len(record.seeds))
    yield _lines(f"{fault}: {verdict} ({by})" for fault, _, verdict, by, *_ in record.faults) or "-"
    yield _lines(filter(None, (record.hardware, record.ran)))
    yield _hours(record) + ("" if record.device == "GPU" else f" ({record.device})")


def _page(record: Record, recipe: Path, root: Path) -> Iterator[str]:
    """The text of docs/evidence/NAME.md, line by line."""
    name = record.name
    yield f"# {name}: {_verdicts(record)}"
    yield ""
    yield "Written by `python docs/evidence.py`. All experiments: [evidence.md](../evidence.md)."
    for paragraph in claim(recipe):
        yield from ("", paragraph)
    yield from ("", *_facts(record, recipe), "")
    yield from ("```sh", record.command, f"{_against_reference(record)}```", "")
    yield from ("## Verdict", "", *_claims(record))
    yield from (f"![{Path(one).stem}, both arms]({name}/{one})\n" for one in record.pictures)
    for arm in record.arms:
        yield from _open(arm)
    yield from ("## What it rests on", "", "| | |", "|---|---|")
    content = read_verdict(root / PAGES / name)
    beside = evidence({**content, "sensitivity": None, "not_tested": []})  # which have lists of their own
    yield from (table_row([label, text]) for label, text in beside)
    yield from ("", "Not tested:", "", *(f"- {escaped(one)}" for one in content["not_tested"]), "")
    yield from _distances(record)
    yield from ("## Positive control", "", *_planted(record))
    yield from ("## What the arms said", "", *_completions(record))


def _facts(record: Record, recipe: Path) -> Iterator[str]:
    files = [f"[{one}]({record.name}/{one})" for one in (VERDICT, REFERENCE)]
    if record.no_reference is not None:
        files[1] = f"no reference: {escaped(record.no_reference)}"
    yield "| | |"
    yield "|---|---|"
    yield from (f"| claimed elsewhere | {_of(arm, record)}{claimed(arm.title)[0]} |" for arm in record.arms)
    yield f"| recipe | `{RECIPES}/{recipe.name}` |"
    yield f"| hardware | {escaped(record.hardware or 'unknown')} |"
    yield f"| ran | {escaped(record.ran or 'unknown')} |"
    yield (
        f"| {record.device} hours | {_hours(record)}: the wall time of each of {record.num_runs} runs times "
        f"its {record.device}s, whether or not others shared them |"
    )
    yield f"| seeds | {', '.join(map(str, record.seeds))} |"
    yield f"| files | {', '.join(files)} |"


def _against_reference(record: Record) -> str:
    """The line that compares a repetition with these runs."""
    if record.no_reference is not None:
        return ""
    return (
        f"abrun compare {record.name} --reference {PAGES}/{record.name}/{REFERENCE}    # yours with these\n"
    )


def _claims(record: Record) -> Iterator[str]:
    several = len(record.arms) > 1
    for arm in record.arms:
        yield from (f"- {_of(arm, record)}{escaped(reason)}" for reason in arm.reasons)
    yield ""
    if record.claim_columns:
        yield table_row(["arm"] * several + record.claim_columns)
        yield "|" + "---|" * (several + len(record.claim_columns))
        for arm in record.arms:
            yield from (table_row([arm.name] * several + cells) for cells in arm.claims)
        yield ""


def _open(arm: Arm) -> Iterator[str]:
    """What could be done next, where the verdict decides nothing or is not what was claimed."""
    if _as_claimed(arm) == "not as claimed":
        yield f"{arm.title}: {arm.verdict} is not what was claimed, which would be {claimed(arm.title)[1]}."
    elif arm.verdict in ("INCONCLUSIVE", "INVALID"):
        yield f"{arm.title} is {arm.verdict}, for the reasons above."
    else:
        return
    yield from ("What could be done next:", "")
    yield from (f"- {escaped(step.text)}: {code(step.command)}" for step in arm.next_steps)
    yield ""


def _distances(record: Record) -> Iterator[str]:
    if not record.apart:
        return
    yield (
        "How far apart runs lie, as a mean over steps: a treatment from its baseline; the baseline from "
        "itself, run again, and run from first weights moved by one ULP; the baseline's seeds (their sd). "
        "Where the baseline repeats bit for bit, the last column says from which step on the arms differ."
    )
    yield from ("", table_row(OF_METRICS), "|" + "---|" * len(OF_METRICS))
    yield from (table_row(cells) for cells in record.apart)
    yield ""


def _planted(record: Record) -> Iterator[str]:
    if not record.faults:
        yield from ("No fault was planted beside it.", "")
        return
    yield "Faults planted in the baseline, each judged as a treatment is. What can be seen is a MISMATCH."
    yield from ("", table_row(COLUMNS), "|" + "---|" * len(COLUMNS))
    yield from (table_row(cells) for cells in record.faults)
    yield from ("", *(f"- Not caught: {escaped(one)}" for one in record.missed), *[""] * bool(record.missed))


def _completions(record: Record) -> Iterator[str]:
    if not record.said:
        yield "No completions were kept."
        yield ""
    for said in record.said:
        yield f"Step {said.step}, seed {record.samples_seed}:"
        yield ""
        yield table_row(["prompt", *record.samples_arms])
        yield "|" + "---|" * (1 + len(record.samples_arms))
        for prompt, of_arms in said.prompts:
            yield f"| {' | '.join([_text(prompt), *map(_completion, of_arms)])} |"
        yield ""


def _completion(said: tuple[str, float | None] | None) -> str:
    if said is None:
        return "not kept"
    text, reward = said
    return f"{_text(text)}<br>*reward {'unknown' if reward is None else f'{reward:.3g}'}*"


def _text(text: str) -> str:
    """In a cell of a table: a long one by its beginning and its end."""
    if len(text) > MOST_CHARACTERS:
        text = f"{text[: MOST_CHARACTERS * 2 // 3]} [...] {text[-MOST_CHARACTERS // 3 :]}"
    return _lines(text.strip().splitlines()) or "(nothing)"


def _contents(site: str, names: Iterable[str]) -> str:
    """.mkdocs.yml with the pages that there are."""
    lines = "".join(f"      - {name}: evidence/{name}.md\n" for name in names)
    return re.sub(r"(?<=      - All experiments: evidence\.md\n)(?:      - .*\n)*", lines, site)


# --- in few words ---


def _verdicts(record: Record) -> str:
    """`MATCH`, or of several treatments `fused MATCH, fp32-head MISMATCH`."""
    if len(record.arms) == 1:
        return record.arms[0].verdict
    return ", ".join(f"{arm.name} {arm.verdict}" for arm in record.arms)


def claimed(title: str) -> tuple[str, str | None]:
    """A name in CLAIMED is part of an experiment's, or of an arm's title."""
    return next((said for name, said in CLAIMED.items() if name in title), ("-", None))


def _as_claimed(arm: Arm) -> str:
    """Empty where nothing was claimed, or the verdict decides nothing."""
    expected = claimed(arm.title)[1]
    if expected is None or arm.verdict in ("INCONCLUSIVE", "INVALID"):
        return ""
    return "as claimed" if arm.verdict == expected else "not as claimed"


def _in_short(claim: Sequence[str]) -> str:
    """`train/reward ±0.05: -0.003 [-0.02, 0.02], bound 0.02, equivalent`, as far as it has them."""
    metric, _, _, difference, margin, bound, result = claim
    said = [*[difference] * (difference != "-"), *[f"bound {bound}"] * (bound != "-"), result]
    return f"{metric} {margin}: {', '.join(said)}"


def _of(arm: Arm, record: Record) -> str:
    return f"{escaped(arm.name)}: " if len(record.arms) > 1 else ""


def _hours(record: Record) -> str:
    return "unknown" if record.device_hours is None else f"{record.device_hours:.2g}"


def _lines(texts: Iterable[str]) -> str:
    return "<br>".join(escaped(text) for text in texts)


def main(arguments: Sequence[str]) -> int:
    """Exit code 2 for bad input, with one line."""
    try:
        for record in record_all(Path(arguments[0]), ROOT) if arguments else ():
            print(f"{record.name}: {_verdicts(record)}")
        for path, text in pages(ROOT).items():
            write_file(ROOT / path, text.encode(), mode=PUBLIC)
    except AbrunError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
