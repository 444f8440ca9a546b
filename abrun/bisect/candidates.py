"""What is bisected: commits of a git repository, or versions of a package. Nothing is written here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from abrun.errors import RecipeError
from abrun.launch.git import git_output
from abrun.redaction import shortened, shown

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
        raise RecipeError(f"--bad: got {bad!r}, which does not come after {good!r} (--good); exchange them?")
    after = git_output(repo, "rev-list", "--first-parent", "--reverse", f"{first}..{last}") or ""
    if not after:
        raise RecipeError(f"--bad: got {bad!r}, the very commit of --good; nothing lies between them")
    return _listed(repo, [first, *after.split()], "--good")


def refs(repo: Path, names: Sequence[str]) -> list[Candidate]:
    """Any commits, in the order given: the good one first, the bad one last."""
    return _listed(repo, [_commit(repo, name, "--refs") for name in names], "--refs")


def versions(package: str, numbers: Sequence[str]) -> list[Candidate]:
    """Versions of a package in the order given: the good one first, the bad one last."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", package) or len(package) > 40:
        raise RecipeError(f"--package: got {shortened(package)}; allowed: a name such as torch")
    for number in numbers:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!]{0,50}", number):
            raise RecipeError(f"--versions: got {shortened(number)}; allowed: such as 2.10.0,2.11.0,2.12.0")
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
        raise RecipeError(f"{option}: got {len(shas)} commits; allowed: at most {MOST}: narrow it down")
    said = git_output(repo, "show", "--no-patch", "--format=%H %s", *shas) or ""
    titles = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
    found = [
        Candidate(arm=sha[:12], title=f"{sha[:9]} {shown(titles.get(sha, ''))[:60]}", commit=sha)
        for sha in shas
    ]
    return _at_least_two(found, option)


def _at_least_two(found: list[Candidate], option: str) -> list[Candidate]:
    arms = [candidate.arm for candidate in found]
    twice = next((arm for arm in arms if arms.count(arm) > 1), None)
    if twice or len(found) < 2:
        got = f"{twice} twice" if twice else f"{len(found)} candidate"
        raise RecipeError(f"{option}: got {got}; allowed: two or more, the good one first, the bad one last")
    return found


def _commit(repo: Path, name: str, option: str) -> str:
    found = (
        None
        if name.startswith("-")
        else git_output(repo, "rev-parse", "--verify", "-q", f"{name}^{{commit}}")
    )
    if not found and git_output(repo, "rev-parse", "--git-dir") is None:
        raise RecipeError(f"--repo: got {shortened(str(repo))}, no git repository; allowed: the trainer's")
    if not found:
        raise RecipeError(f"{option}: got {shortened(name)}, no commit of {repo} (--repo)")
    return found
