"""Sentences of refusals to compare: runs, options, references and ledgers that cannot be used."""

from collections.abc import Mapping

from abrun.messages.codes import Code
from abrun.messages.message import Message


def _budget_refused(budget: str, metrics: list[str]) -> str:
    examples = ", ".join(f"{metric}=0.05" for metric in metrics)
    return (
        f"--budget: got {budget}; allowed: a number above 0 in units of the claim, for a claim with a "
        f"margin: {examples or 'none is declared (--claim)'}"
    )


def _ledger_link_edited(path: str, entry: int) -> str:
    """Content below a ledger's entry was changed after the entry was added."""
    content = f"entry {entry - 1}" if entry > 1 else "the frozen runs, or the ledger's budget or rule"
    return f"{path}: ledger: {content} changed after entry {entry} was added; {_RESTORE}"


_RESTORE = "restore the file (git log shows it)"
_AXES = {"steps": "training steps", "final": "final scores", "prompts": "scores per prompt"}


def _axes_mixed(places: Mapping[str, str]) -> str:
    kinds = " and ".join(f"{_AXES[axis]} ({place})" for axis, place in places.items())
    return f"sources: got {kinds}, which have no values in common; compare runs of one kind"


EXPERIMENTS: dict[Code, Message] = {
    Code.CLAIM_TWICE: "--claim: got {metric:repr} twice; give every claim once",
    Code.CLAIM_ON_TEXT: "--claim: metric {metric:repr} is not recorded as numbers in any run: {unread}",
    Code.CLAIM_NOT_RECORDED: "--claim: metric {metric:repr} is not recorded in any run; {close:if did you "
    "mean {close:repr}? }recorded: {recorded}",
    Code.OPTION_FOR_EXPERIMENT: "{option}: got {value:repr}, but {experiment} is an experiment that already "
    "records its arms, seeds and metrics; drop the option, or give the folders of the arms",
    Code.ALL_EXCLUDED: "--exclude: {patterns} leaves no run to compare; drop one",
    Code.EXCLUDES_NOTHING: "--exclude: '{pattern}' matches no run; there are {runs}",
    Code.SEEDS_NOT_RECORDED: "--seeds: there is no run of {seeds:list}; there are {recorded:list}",
    Code.INTERIM_REFUSED: "--interim: got {interim}; allowed: two or more increasing numbers of pairs, from "
    "2 up, such as 3,5,8",
    Code.INTERIM_WITH_REFERENCE: "--interim: got {interim} with a reference, which allows no interim "
    "analyses; drop it",
    Code.INTERIM_UNPAIRED: "--interim: got {interim} with unpaired runs; give both arms the same seeds, or "
    "drop it",
    Code.INTERIM_TOO_LATE: "--interim: got {interim}, but there are only {num_pairs} pairs; train more for "
    "the first analysis",
    Code.INTERIM_TOO_EARLY: "--interim: got {interim}, but there are {num_pairs} pairs, and the last "
    "analysis takes all; choose pairs with --seeds",
    Code.ONLY_INJECTED_FAULTS: "{experiment}: has injected faults but no treatment; its "
    "report/sensitivity.md says which were caught (abrun faults run --resume prints it)",
    Code.REPORT_IS_LINK: "{folder}: is a symbolic link; remove it, or choose a folder with --output",
    Code.REPORT_OF_DECLARED: "--output: {folder} has the report of the comparison declared at launch, which "
    "this one would replace; choose another folder",
    Code.REPORT_OF_OTHER: "--output: {folder} is for the report of the experiment {experiment}; choose "
    "another folder",
    Code.NO_FIGURES: "formats: png and svg: {missing}; or use html, markdown and json",
    Code.FORMATS_WITHOUT_FOLDER: "abrun.compare: formats requires output, the folder of the report; add it",
    Code.ARM_NOT_NAMED: "--arm: missing; {experiment} has {treatments:if {treatments:list}|no treatment}",
    Code.ARM_WITHOUT_REFERENCE: "--arm requires --reference; add it, or drop --arm {arm}",
}
SOURCES: dict[Code, Message] = {
    Code.MORE_THAN_SEEDS_DIFFERS: "arms: the names of the {num_runs} runs in {folder} give seeds but no "
    "arms, and other parts differ ({names}); if they are all one arm, name it: ARM={folder}",
    Code.ARM_NAMED_TWICE: "--pattern: got {pattern:repr} with {{arm}}, but the sources name their arms; drop "
    "{{arm}} or the names",
    Code.SOURCES_OF_ONE_NAME: "sources: {sources} would all be named {arm:repr}; name the arms, such as "
    "baseline={first}",
    Code.ONE_ARM_OF_RUNS: "arms: found only {arms} in {num_runs:count run}, but a comparison needs two; add "
    "a source, or name the arms, such as --pattern '{{arm}}-s{{seed}}'",
    Code.AXES_MIXED: _axes_mixed,
    Code.NO_SHARED_PROMPT: "{metric}: no prompt is in every run ({places:join  and }); score all runs on the "
    "same prompts",
    Code.RUN_IN_TWO_SOURCES: "sources: {sources} both hold {place}, and a run compared with itself always "
    "agrees; give each arm its own runs",
    Code.RUN_GIVEN_TWICE: "sources: {places} are one file, and a run compared with itself always agrees; "
    "give each arm its own runs",
    Code.SOURCE_OF_SEVERAL_ARMS: "sources: {source} holds runs of several arms ({arms}); give one of them, "
    "such as {example}",
    Code.SOURCE_OF_ARMS_AND_SEEDS: "sources: {source} holds runs of several arms ({arms}); leave out all but "
    "one, such as --exclude {pattern}, or give this source alone",
    Code.ARM_WITHOUT_NUMBERS: "arms: {arm:repr} has no numbers in {num_runs:count run}: {why}",
    Code.NO_NUMBERS: "{place}: {note}; give files with a metric's numbers by step",
    Code.NOTHING_NUMERIC: "no metric has a number in it",
    Code.RERUN_WITHOUT_RUN: "{run}: named as an A/A rerun (-aa) of a run that is not here; add that run, or "
    "leave this one out with --exclude",
}
REFERENCES: dict[Code, Message] = {
    Code.VERSIONS_DIFFER_OF_REFERENCE: "--versions-differ: got it with a reference, which always allows "
    "other versions; drop it",
    Code.REFERENCE_NEEDS_ARM: "--reference: {experiment} has several arms; choose one with --arm: "
    "{arms:list}",
    Code.REFERENCE_NEEDS_SEEDS: "{experiment}: arm {arm} has {num_seeds} seed, but a reference needs at "
    "least two to know the spread; launch more seeds",
    Code.REFERENCE_NEEDS_WHOLE_RUNS: "{run} is not finished ({status}), but a reference needs finished runs",
    Code.REFERENCE_NOT_WRITTEN: "--output: {path} cannot be written: {problem}; choose another file",
    Code.OUTPUT_NOT_A_REFERENCE: "--output: {path} exists and is not a reference that this abrun reads; "
    "choose another file",
    Code.OUTPUT_HAS_LEDGER: "--output: {path} has a ledger (entries: {num_entries}), which would be lost; "
    "choose another file",
    Code.NO_REFERENCE_FILE: "reference: got {path:repr}, {problem}; make one with abrun reference save",
    Code.EXPERIMENT_AS_REFERENCE: "{path}: belongs to an experiment and is not a reference; make one from "
    "its runs: abrun reference save {folder} --output reference.json",
    Code.OTHER_REFERENCE_VERSION: "{path}: schema_version is {version}, but this abrun reads {expected}; "
    "make the reference again with abrun reference save",
    Code.NOT_A_REFERENCE: "{path}: not a reference: {problem}; make one with abrun reference save",
}
LEDGERS: dict[Code, Message] = {
    Code.BUDGET_REFUSED: _budget_refused,
    Code.NO_LEDGER: "{reference}: has no ledger; save a reference with one: abrun reference save SOURCE "
    "-o FILE --budget 0.05",
    Code.LEDGER_HAS_RUNS: "{experiment}: {arm} is already entry {entry}, so nothing was added",
    Code.LEDGER_OF_POST_HOC: "{experiment}: post hoc: {why}; a ledger takes only comparisons declared before "
    "the runs",
    Code.NO_TREATMENT_DECLARED: "{experiment}: declares no treatment; a ledger takes only experiments that "
    "abrun launched",
    Code.LEDGER_TAKES_MATCHES: "{experiment}: {arm}: the verdict is {verdict}, but a ledger takes only "
    "matches: {reason}",
    Code.LEDGER_OF_OTHER_CLAIM: "{experiment}: {arm}: claims {claims}, but the ledger tracks {metric} over "
    "steps {first}-{last}, with a margin",
    Code.BASELINE_WITHOUT_CONFIG: "{experiment}: its baseline records no configuration, so it cannot be "
    "checked against {link}",
    Code.BASELINE_NOT_THE_LINK: "{experiment}: {baseline}: {key} is {value}, but {expected} in "
    "{link}{entry:if  (entry {entry} is an experiment of this name)}; compare the change with {link}",
    Code.LEDGER_NOT_READ: "{path}: ledger.{where}: {problem}; restore the file",
    Code.LEDGER_LINK_EDITED: _ledger_link_edited,
    Code.LEDGER_ENTRY_EDITED: "{path}: ledger: entry {entry} was edited after it was written; restore the "
    "file (git log shows it)",
    Code.OUTPUT_UNWRITABLE: "--output: {folder} cannot be written: {problem}; choose another folder",
    Code.EXPERIMENT_BESIDE_SOURCES: "abrun.compare: got an Experiment and other sources; give the Experiment "
    "alone, or give paths",
    Code.EXPERIMENT_WITH_OPTION: "abrun.compare: got {option} with an Experiment that is already loaded; "
    "pass it to abrun.load",
    Code.OTHER_VERDICT_SCHEMA: "{path}: schema_version is {version}, but this abrun reads {readable}; "
    "compare the runs again",
    Code.VERDICT_DAMAGED: "{path}: {field}: {problem}; compare the runs again",
}
MESSAGES = {**EXPERIMENTS, **SOURCES, **REFERENCES, **LEDGERS}
