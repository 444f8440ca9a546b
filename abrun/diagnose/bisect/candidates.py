"""What is bisected: commits of a git repository, or versions of a package. Nothing is written here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from abrun.errors import RecipeError
from abrun.launch.git import git_output
from abrun.reasons import Code
from abrun.redaction import display_safe, shortened

MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One state of the code under test, and the name of its arm."""

    arm: str
    title: str  # for people: a commit's first line, or a version
    commit: str | None = None  # of the repository
    requirement: str | None = None  # what pip installs


def commits(repo: Path, good: str, bad: str) -> list[Candidate]:
    """The good commit, then the first-parent commits after it up to the bad one."""
    first, last = _commit(repo, good, "--good"), _commit(repo, bad, "--bad")
    if git_output(repo, "merge-base", "--is-ancestor", first, last) is None:
        raise RecipeError(Code.BISECT_ORDER_REVERSED(bad=bad, good=good))
    after = git_output(repo, "rev-list", "--first-parent", "--reverse", f"{first}..{last}") or ""
    if not after:
        raise RecipeError(Code.BISECT_SAME_COMMIT(bad=bad))
    return _listed(repo, [first, *after.split()], "--good")


def refs(repo: Path, names: Sequence[str]) -> list[Candidate]:
    """Any commits, in the order given: the good one first, the bad one last."""
    return _listed(repo, [_commit(repo, name, "--refs") for name in names], "--refs")


def versions(package: str, numbers: Sequence[str]) -> list[Candidate]:
    """Versions of a package in the order given: the good one first, the bad one last."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", package) or len(package) > 40:
        raise RecipeError(Code.SETTING_REFUSED(field="--package", got=shortened(package)))
    for number in numbers:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!]{0,50}", number):
            raise RecipeError(Code.SETTING_REFUSED(field="--versions", got=shortened(number)))
    found = [
        Candidate(
            arm=re.sub(r"[+!]", "_", f"{package}-{number}"),
            title=f"{package} {number}",
            requirement=f"{package}=={number}",
        )
        for number in numbers
    ]
    return _at_least_two(found, "--versions")


def _listed(repo: Path, shas: Sequence[str], option: str) -> list[Candidate]:
    if len(shas) > MOST:
        raise RecipeError(Code.TOO_MANY_COMMITS(option=option, commits=len(shas), max_commits=MOST))
    said = git_output(repo, "show", "--no-patch", "--format=%H %s", *shas) or ""
    titles = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
    found = [
        Candidate(arm=sha[:12], title=f"{sha[:9]} {display_safe(titles.get(sha, ''))[:60]}", commit=sha)
        for sha in shas
    ]
    return _at_least_two(found, option)


def _at_least_two(found: list[Candidate], option: str) -> list[Candidate]:
    arms = [candidate.arm for candidate in found]
    twice = next((arm for arm in arms if arms.count(arm) > 1), None)
    if twice or len(found) < 2:
        got = f"{twice} twice" if twice else f"{len(found)} candidate"
        raise RecipeError(Code.TOO_FEW_CANDIDATES(option=option, got=got))
    return found


def _commit(repo: Path, name: str, option: str) -> str:
    found = (
        None
        if name.startswith("-")
        else git_output(repo, "rev-parse", "--verify", "-q", f"{name}^{{commit}}")
    )
    if not found and git_output(repo, "rev-parse", "--git-dir") is None:
        raise RecipeError(Code.SETTING_REFUSED(field="--repo", got=shortened(str(repo))))
    if not found:
        raise RecipeError(Code.COMMIT_UNKNOWN(option=option, got=shortened(name), repo=repo))
    return found
