"""Sentences of fleets: many recipes judged side by side."""

from abrun.messages.codes import Code
from abrun.messages.message import Message

MESSAGES: dict[Code, Message] = {
    Code.FLEET_WITHOUT_REFERENCE: "{recipe} has no reference; make one: abrun reference save RUNS "
    "-o {reference}",
    Code.FLEET_TWO_REFERENCES: "{recipe} has two references, {first} and {second}; remove one",
    Code.FLEET_WITHOUT_RUNS: "{recipe} has a reference but no runs in {folder}; run it, or remove "
    "its reference",
    Code.FLEET_REFERENCE_RED: "the reference itself is red: {problem}; make a new reference",
    Code.FLEET_GONE_ON_RETRY: "{attempt}{num_more:if , and {num_more} more|}; every run finished in a later "
    "attempt and matches",
    Code.FLEET_GONE_ON_RERUN: "gone on the rerun, which matches ({num_runs:count run}). At first: {cause}",
    Code.FLEET_DIFFERENCE: "{metric}: {runs:count run}, {difference:+.3g} from the reference, margin "
    "{margin:.3g}; p = {p:.2g} if the margin held, by the noise of this fleet's recipes",
    Code.FLEET_IMPROVED: "better than the reference, beyond the margin; make a new reference if that is "
    "meant. {cause}",
    Code.FLEET_ONE_RUN: "one run shows no more than an accident could: {cause}; rerun it",
    Code.FLEET_REPAIRED: "red in the earlier fleet, and matches now: {cause}",
    Code.FLEET_RED_EARLIER: "red in the earlier fleet as well: {cause}",
    Code.FLEET_RED_ON_RERUN: "red again on the rerun of {num_runs:count run}: {cause}",
    Code.FLEET_RERUN_OPEN: "{cause}. The rerun decides nothing: {rerun}; add seeds",
    Code.FLEET_RERUN_UNREADABLE: "{cause}. The rerun cannot be judged: {problem}",
    Code.FLEET_FEW_FAILED: "{num_runs:count run}, of which seed {seeds:list} failed{is_rerun:if , some of "
    "them again on the rerun}, as accidents in this fleet could: {cause}; rerun {seeds:plural that seed}",
    Code.FLEET_MAY_BE_CHANCE: "red by itself, but chance among so many recipes could explain it (false "
    "discovery rate {rate:.2g}): {cause}; rerun it with more seeds",
}
