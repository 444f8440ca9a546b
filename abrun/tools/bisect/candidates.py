"""Candidates of a bisection: commits of a git repository, or versions of a package. Read-only."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from abrun.errors import RecipeError
from abrun.launch.git import git_output
from abrun.runs.redaction import display_safe, shortened

MAX_CANDIDATES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One state of the code under test, and the name of its arm."""

    arm: str
    title: str  # shown to users: a commit's subject line, or a version
    commit: str | None = None  # of the repository
    requirement: str | None = None  # for pip install


def commits(repo: Path, good: str, bad: str) -> list[Candidate]:
    """Return the good commit, then the first-parent commits after it up to the bad one."""
    good_sha, bad_sha = _commit(repo, good, "--good"), _commit(repo, bad, "--bad")
    if git_output(repo, "merge-base", "--is-ancestor", good_sha, bad_sha) is None:
        raise RecipeError(f"--bad: got {bad!r}, which does not come after {good!r} (--good); swap them?")
    later_shas = git_output(repo, "rev-list", "--first-parent", "--reverse", f"{good_sha}..{bad_sha}") or ""
    if not later_shas:
        raise RecipeError(f"--bad: got {bad!r}, the same commit as --good; nothing lies between them")
    return _candidates_of(repo, [good_sha, *later_shas.split()], "--good")


def refs(repo: Path, names: Sequence[str]) -> list[Candidate]:
    """Return any commits in the given order: the good one first, the bad one last."""
    return _candidates_of(repo, [_commit(repo, name, "--refs") for name in names], "--refs")


def versions(package: str, numbers: Sequence[str]) -> list[Candidate]:
    """Return versions of a package in the given order: the good one first, the bad one last."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", package) or len(package) > 40:
        raise RecipeError(f"--package: got {shortened(package)}; allowed: a name such as torch")
    for number in numbers:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!]{0,50}", number):
            raise RecipeError(f"--versions: got {shortened(number)}; allowed: such as 2.10.0,2.11.0,2.12.0")
    candidates = [
        Candidate(
            arm=re.sub(r"[+!]", "_", f"{package}-{number}"),
            title=f"{package} {number}",
            requirement=f"{package}=={number}",
        )
        for number in numbers
    ]
    return _checked(candidates, "--versions")


def _candidates_of(repo: Path, shas: Sequence[str], option: str) -> list[Candidate]:
    if len(shas) > MAX_CANDIDATES:
        raise RecipeError(
            f"{option}: got {len(shas)} commits; allowed: at most {MAX_CANDIDATES}; narrow the range"
        )
    log_text = git_output(repo, "show", "--no-patch", "--format=%H %s", *shas) or ""
    titles = dict(line.split(" ", 1) for line in log_text.splitlines() if " " in line)
    candidates = [
        Candidate(arm=sha[:12], title=f"{sha[:9]} {display_safe(titles.get(sha, ''))[:60]}", commit=sha)
        for sha in shas
    ]
    return _checked(candidates, option)


def _checked(candidates: list[Candidate], option: str) -> list[Candidate]:
    arms = [candidate.arm for candidate in candidates]
    repeated_arm = next((arm for arm in arms if arms.count(arm) > 1), None)
    if repeated_arm or len(candidates) < 2:
        got = f"{repeated_arm} twice" if repeated_arm else f"{len(candidates)} of them"
        raise RecipeError(
            f"{option}: got {got}; allowed: two or more different ones, the good one first, the bad one last"
        )
    return candidates


def _commit(repo: Path, name: str, option: str) -> str:
    sha = (
        None
        if name.startswith("-")
        else git_output(repo, "rev-parse", "--verify", "-q", f"{name}^{{commit}}")
    )
    if not sha and git_output(repo, "rev-parse", "--git-dir") is None:
        raise RecipeError(
            f"--repo: got {shortened(str(repo))}, which is not a git repository; give the trainer's"
        )
    if not sha:
        raise RecipeError(f"{option}: got {shortened(name)}, which is not a commit of {repo} (--repo)")
    return sha
