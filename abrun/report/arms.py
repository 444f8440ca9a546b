"""Many arms on one screen: a sorted table with a row an arm, instead of a paragraph an arm."""

from collections.abc import Iterator
from itertools import compress

import numpy as np

from abrun.messages import sentences
from abrun.messages.codes import Code
from abrun.messages.numbers import SCORES_TEXT, difference_text, listed, more_text
from abrun.report.evidence import MAX_PARAGRAPHS
from abrun.report.present.tables import Table, columns
from abrun.stats.noise import find_outliers
from abrun.verdict.description import is_discovered
from abrun.verdict.evidence import Evidence
from abrun.verdict.verdict_file import VerdictFile

MAX_NAMED = 6
# Reasons of one arm that its row says as well
_IN_ROW = (
    *(Code.DESCRIBED, Code.OTHER_METRICS, Code.RATIO_AT_EACH_STEP, Code.NEW_RUN_RANGE),
    *(Code.CLAIM_DIFFERS, Code.CLAIM_EQUIVALENT, Code.CLAIM_UNDECIDED, Code.CLAIM_DETECTED),
    *(Code.CLAIM_PASSES, Code.CLAIM_FAILS, Code.CLAIM_OPEN, Code.CLAIM_TOO_FEW_PAIRS),
    *(Code.LIMIT_HOLDS, Code.LIMIT_BROKEN, Code.LIMIT_UNDECIDED, Code.EXACT_HOLDS, Code.EXACT_BROKEN),
)


def has_many_arms(content: VerdictFile) -> bool:
    return len(content.arms) > MAX_PARAGRAPHS


def main_rows(content: VerdictFile) -> list[Evidence]:
    """Return the description of the first metric for each arm that has one, the lowest difference first."""
    described = content.select("description")
    rows = [row for row in described if row["metric"] == described[0]["metric"]]
    return sorted(rows, key=lambda row: row["difference"])


def arms_table(content: VerdictFile) -> Table | None:
    """Return the arms by their first metric, the baseline among them; None unless they are described."""
    rows = main_rows(content)
    if not rows:
        return None
    outliers, row = _outlying_arms(rows, content.baseline), rows[0]
    window = SCORES_TEXT.get(row["axis"]) or f"steps {row['steps'][0]}-{row['steps'][1]}"
    baseline = [content.baseline, f"{row['baseline']:.4g}", "baseline", "", ""]
    cells = []
    for row in rows:
        difference, interval = row["difference"], row["interval"]
        text = difference_text(difference, interval) if interval else f"{difference:+.3g}"
        tested = [
            other for other in content.select("description", row.arm) if other["p_adjusted"] is not None
        ]
        counts = f"{sum(map(is_discovered, tested))} of {tested[0]['num_metrics']}" if tested else "-"
        outlier = "stands out" * (row.arm in outliers)
        cells.append([row.arm, f"{row['treatment']:.4g}", text, counts, outlier])
    baseline[-1] = "stands out" * (content.baseline in outliers)
    cells.insert(sum(row["difference"] < 0 for row in rows), baseline)
    difference = "difference [90 % CI]" if any(row["interval"] for row in rows) else "difference"
    heading = columns("arm", f"{row['metric']}, {window}", difference, "others that differ", "", fold=True)
    return Table(heading, cells, optional=("others that differ",))


def _outlying_arms(rows: list[Evidence], baseline: str) -> list[str]:
    """Return the arms whose level is far from that of most arms, beside the spread of all arms."""
    levels = np.array([rows[0]["baseline"], *(row["treatment"] for row in rows)])
    widths = [np.ptp(row["interval"]) / 2 if row["interval"] else 0.0 for row in rows]
    is_outlier = find_outliers(levels, np.array([max(widths), *widths]))
    return [*compress([baseline, *(row.arm for row in rows)], is_outlier)]


def short_reasons(content: VerdictFile) -> list[str]:
    """Return the reasons as sentences; of many arms a summary, and what their rows do not say."""
    if not has_many_arms(content):
        return sentences(content.reasons)
    inner = [reason["reason"] if reason.code == Code.OF_ARM else reason for reason in content.reasons]
    kept_reasons = [*compress(content.reasons, (reason.code not in _IN_ROW for reason in inner))]
    arm_reasons = [reason for reason in kept_reasons if reason.code == Code.OF_ARM]
    shown_reasons = [reason for reason in kept_reasons if reason not in arm_reasons[MAX_NAMED:]]
    num_more = len(arm_reasons) - MAX_NAMED
    omitted = [f"{num_more} more reasons of single arms: -v"] * (num_more > 0)
    return [*_summarize(content), *sentences(shown_reasons), *omitted]


def _summarize(content: VerdictFile) -> Iterator[str]:
    if content.claims:
        for result in ("different", "undecided", "not tested", "equivalent", "holds"):
            arms = dict.fromkeys(claim.arm for claim in content.claims if claim.result == result)
            if arms:
                yield f"{result}: {len(arms)} of {len(content.arms)} arms ({_some(list(arms))})"
        return
    rows = main_rows(content)
    if not rows:
        return
    levels = {content.baseline: rows[0]["baseline"]} | {row.arm: row["treatment"] for row in rows}
    low, high = min(levels, key=levels.__getitem__), max(levels, key=levels.__getitem__)
    outliers = _outlying_arms(rows, content.baseline)
    out = f"; {len(outliers)} stand{'s' * (len(outliers) == 1)} out: {_some(outliers)}" if outliers else ""
    metric = f"{rows[0]['metric']} of {len(levels)} arms"
    yield f"{metric}: {levels[low]:.4g} ({low}) to {levels[high]:.4g} ({high}){out}"


def _some(names: list[str]) -> str:
    return listed(names[:MAX_NAMED]) + more_text(len(names) - MAX_NAMED)
