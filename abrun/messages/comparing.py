"""Sentences of refusals to compare: runs, options, references and ledgers that do not fit."""

from abrun.messages.message import Message
from abrun.reasons import Code


def _budget_refused(budget: str, metrics: list[str]) -> str:
    """--budget does not say how much of which claim."""
    known = ", ".join(f"{metric}=0.05" for metric in metrics)
    return (
        f"--budget: got {budget}; allowed: a number above 0, in units of the claim; of a claim with a "
        f"margin: {known or 'none is declared (--claim)'}"
    )


def _ledger_link_edited(path: str, entry: int) -> str:
    """A ledger's entry was added to other content."""
    before = f"entry {entry - 1}" if entry > 1 else "the frozen runs, or the ledger's budget or rule"
    return f"{path}: ledger: {before} is not what entry {entry} was added to: the file was edited; {_RESTORE}"


_RESTORE = "restore it (git log shows it)"
EXPERIMENTS: dict[Code, Message] = {
    Code.CLAIM_TWICE: "--claim: got a claim on {metric:repr} twice; every claim once",
    Code.CLAIM_ON_TEXT: "--claim: got metric {metric:repr}, which no run recorded as numbers: {unread}",
    Code.CLAIM_NOT_RECORDED: "--claim: got metric {metric:repr}, which no run recorded; {close:if did you "
    "mean {close:repr}? }recorded are: {recorded}",
    Code.OPTION_FOR_EXPERIMENT: "{option}: got {value:repr} for {experiment}, an experiment, whose arms, "
    "seeds and metrics are recorded; drop it, or name the folders of the arms",
    Code.ALL_EXCLUDED: "--exclude: got {patterns}, which leaves no run to compare; drop one",
    Code.EXCLUDES_NOTHING: "--exclude: got '{pattern}', which no run matches; there are {runs}",
    Code.SEEDS_NOT_RECORDED: "--seeds: got {seeds:list}, of which there is no run; there are {recorded:list}",
    Code.INTERIM_REFUSED: "--interim: got {interim}; allowed: two or more increasing numbers of pairs, such "
    "as 3,5,8",
    Code.INTERIM_WITH_REFERENCE: "--interim: got {interim} for a reference, which is compared once; drop it",
    Code.INTERIM_UNPAIRED: "--interim: got {interim} for runs that are not paired; give both arms the same "
    "seeds, or drop it",
    Code.INTERIM_TOO_LATE: "--interim: got {interim} for {num_pairs} pairs, of which none is taken; train "
    "more for the first",
    Code.INTERIM_TOO_EARLY: "--interim: got {interim} for {num_pairs} pairs; the last analysis takes all: "
    "choose pairs with --seeds",
    Code.ONLY_INJECTED_FAULTS: "{experiment}: got injected faults and no treatment: what was caught of them "
    "is in its report/sensitivity.md (abrun sensitivity --resume prints it)",
    Code.ONE_ARM: "{experiment}: got the arm {arm:repr} alone, and nothing to compare it with; give "
    "--reference FILE (abrun freeze makes one)",
    Code.REPORT_IS_LINK: "{folder}: got a symbolic link; remove it, or choose a folder with --output",
    Code.NO_FIGURES: "--format: png and svg: {missing}; or --format terminal,html,markdown,json",
    Code.ARM_NOT_NAMED: "--arm: got none; {experiment} has {treatments:if {treatments:list}|no treatment}",
    Code.ARM_WITHOUT_REFERENCE: "--arm: got {arm:repr} without --reference, whose counterpart it names; "
    "drop it",
}
SOURCES: dict[Code, Message] = {
    Code.MORE_THAN_SEEDS_DIFFERS: "arms: got {folder}, whose {num_runs} runs name their seeds, no arms, and "
    "more that differs ({names}); where all are of one arm, name it: ARM={folder}",
    Code.SOURCE_OF_ONE_ARM: "arms: {source} holds one arm of {num_seeds:count seed}; give the other arm's "
    "folder (abrun compare {source} OTHER), or --reference FILE",
    Code.ARM_NAMED_TWICE: "--pattern: got {pattern:repr} and sources with a name; allowed: one of them to "
    "say the arm; leave out {{arm}} or the names",
    Code.SOURCES_OF_ONE_NAME: "sources: got {sources}, which would all be the arm {arm:repr}; name them, "
    "such as baseline={first}",
    Code.ONE_ARM_OF_RUNS: "arms: got only {arms}, of {num_runs} runs; a comparison needs two: add a source, "
    "or say how arms are named, such as --pattern '{{arm}}-s{{seed}}'",
    Code.RUN_IN_TWO_SOURCES: "sources: got {sources}, which both hold {place}; a run compared with itself "
    "always agrees: give each arm its own runs",
    Code.RUN_GIVEN_TWICE: "sources: {places} are one file; a run compared with itself always agrees: give "
    "each arm its own runs",
    Code.SOURCE_OF_SEVERAL_ARMS: "sources: got {source}, which holds the runs of several arms ({arms}); "
    "name {example}",
    Code.SOURCE_OF_ARMS_AND_SEEDS: "sources: {source} holds the runs of several arms ({arms}); leave out "
    "all but one, such as --exclude {pattern}, or give it alone",
    Code.ARM_WITHOUT_NUMBERS: "arms: got {arm:repr}, without a number in {num_runs:count run}: {why}",
    Code.NO_NUMBERS: "{place}: {note}; name files that hold a metric's numbers, by step",
    Code.NOTHING_NUMERIC: "no metric has a number in it",
    Code.RERUN_OF_TREATMENT: "{run}: a same-seed rerun (-aa) of another arm than the baseline "
    "{baseline:repr}; only the baseline's show the noise floor: leave it out",
}
REFERENCES: dict[Code, Message] = {
    Code.VERSIONS_DIFFER_OF_REFERENCE: "--versions-differ: a reference allows other versions already; drop "
    "it",
    Code.REFERENCE_NEEDS_ARM: "--reference: {experiment} has several arms, and a reference is compared with "
    "one: add --arm ARM, one of {arms:list}",
    Code.REFERENCE_NEEDS_SEEDS: "{experiment}: arm {arm} has {num_seeds} seed; a reference needs the spread "
    "over at least two: launch more seeds",
    Code.REFERENCE_NEEDS_WHOLE_RUNS: "{run} is not finished ({status}); a reference needs whole runs",
    Code.REFERENCE_NOT_WRITTEN: "--output: {path} cannot be written: {problem}; choose another file",
    Code.OUTPUT_NOT_A_REFERENCE: "--output: {path} exists and is no reference that abrun reads; choose "
    "another file",
    Code.OUTPUT_HAS_LEDGER: "--output: {path} has a ledger (entries: {num_entries}), which would be lost; "
    "choose another file",
    Code.NO_REFERENCE_FILE: "reference: got {path:repr}, no such file; abrun freeze makes one",
    Code.EXPERIMENT_AS_REFERENCE: "{path}: got an experiment's own file; a reference is frozen from its "
    "runs: abrun freeze {folder} --output reference.json",
    Code.OTHER_REFERENCE_VERSION: "{path}: got schema_version {version}; a reference of version {expected} "
    "is expected: make it with abrun freeze",
    Code.NOT_A_REFERENCE: "{path}: not a reference: {problem}; make it with abrun freeze",
}
LEDGERS: dict[Code, Message] = {
    Code.BUDGET_REFUSED: _budget_refused,
    Code.NO_LEDGER: "{reference}: a reference frozen without a ledger; freeze one: abrun freeze SOURCE -o "
    "FILE --budget 0.05",
    Code.LEDGER_HAS_RUNS: "{experiment}: {arm} is entry {entry} already; nothing was added",
    Code.LEDGER_OF_POST_HOC: "{experiment}: post hoc: {why}; a ledger takes what was declared before",
    Code.NO_TREATMENT_DECLARED: "{experiment}: got runs that declare no treatment; a ledger takes "
    "experiments that abrun launched",
    Code.LEDGER_TAKES_MATCHES: "{experiment}: {arm}: got {verdict}; a ledger takes matches: {reason}",
    Code.LEDGER_OF_OTHER_CLAIM: "{experiment}: {arm}: got claims on {claims}; the ledger is of {metric} "
    "over steps {first}-{last}, with a margin",
    Code.BASELINE_WITHOUT_CONFIG: "{experiment}: its baseline states no configuration to compare with {link}",
    Code.BASELINE_NOT_THE_LINK: "{experiment}: {baseline}: {key}: got {value}; {expected} in {link}, which "
    "a change has to be compared with{entry:if  (entry {entry} is an experiment of this name)}",
    Code.LEDGER_NOT_READ: "{path}: ledger.{where}: {problem}; restore the file",
    Code.LEDGER_LINK_EDITED: _ledger_link_edited,
    Code.LEDGER_ENTRY_EDITED: "{path}: ledger: entry {entry} is not what was written: the file was edited; "
    "restore it (git log shows it)",
    Code.OUTPUT_UNWRITABLE: "--output: {folder} cannot be written: {problem}; choose another folder",
    Code.EXPERIMENT_BESIDE_SOURCES: "abrun.compare: got an Experiment beside other sources; give it alone, "
    "or paths",
    Code.EXPERIMENT_WITH_OPTION: "abrun.compare: got {option} with an Experiment, which has been read; load "
    "it so",
    Code.OTHER_VERDICT_SCHEMA: "{path}: got schema_version {version}; this version reads {readable}",
    Code.VERDICT_DAMAGED: "{path}: {field}: {problem}; compare the runs again",
}
MESSAGES = {**EXPERIMENTS, **SOURCES, **REFERENCES, **LEDGERS}
