"""The checkout and the virtual environment of each candidate: made once, kept under what they are made of."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abrun.diagnose.bisect.candidates import Candidate
from abrun.errors import LaunchError, RecipeError
from abrun.launch.git import GIT, git_environment, git_output
from abrun.reasons import Code
from abrun.recipe.experiment import CommandRecipe
from abrun.redaction import display_safe
from abrun.regular_files import exists, is_directory, is_file
from abrun.runs.files import make_folder, open_log, write_json
from abrun.runs.lock import launcher_lock

FOLDER = ".environments"  # under the runs directory; no experiment can have that name
MADE, LOG = "made.json", "setup.log"
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "PYTHONPYCACHEPREFIX")
VENV = ("-I", "-m", "venv")  # of an interpreter of any version; a module of the folder is not imported
MOST_TAIL = 300


class SetupError(LaunchError):
    """A candidate whose environment cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Where candidates are made ready, and how. Without `setup` or package all share one interpreter."""

    runs_dir: Path
    repo: Path | None
    setup: str | None
    python: str  # the interpreter that makes the virtual environments
    names_checkout: bool  # whether the recipe's command has a parameter for it

    def changes(self, candidate: Candidate) -> dict[str, Any]:
        """What an arm's configuration needs to run a candidate, as dotted keys."""
        place, changes = self._place(candidate), dict[str, Any]()
        if candidate.commit and self.names_checkout:
            changes["trainer.parameters.checkout"] = str(place / "checkout")
        if self._has_venv(candidate):
            changes["trainer.python"] = str(place / "venv" / "bin" / "python")
            changes["trainer.env.VIRTUAL_ENV"] = _literal(place / "venv")
            changes["trainer.env.PATH"] = f"{_literal(place / 'venv' / 'bin')}:${{PATH}}"
        return changes | {f"trainer.env.{name}": _literal(place / "caches" / name.lower()) for name in CACHES}

    def make(self, candidate: Candidate) -> None:
        """Make a candidate ready, unless it is. Raises SetupError with the end of what was printed."""
        place = self._place(candidate)
        make_folder(place)
        with launcher_lock(place):
            if is_file(place / MADE):
                return
            self._clear(candidate)
            log = place / LOG
            log.unlink(missing_ok=True)
            if candidate.commit:
                add = ["worktree", "add", "--force", "--detach", str(place / "checkout"), candidate.commit]
                self._run_git(add, log)
            if self._has_venv(candidate):
                _run([self.python, *VENV, str(place / "venv")], log, None, None)
                directory, env = self._inside(candidate)
                if self.setup:
                    _run(["sh", "-c", self.setup], log, directory, env)
                if candidate.requirement:
                    _run(["python", "-I", "-m", "pip", "install", candidate.requirement], log, directory, env)
            write_json(place / MADE, self._made_of(candidate))

    def remove(self, candidate: Candidate) -> None:
        """Take a candidate's checkout and environment away; of one that could not be made the log stays."""
        place = self._place(candidate)
        if is_directory(place):
            with launcher_lock(place):
                made = is_file(place / MADE)
                (place / MADE).unlink(missing_ok=True)
                self._clear(candidate)
            if made:
                shutil.rmtree(place, ignore_errors=True)

    def _clear(self, candidate: Candidate) -> None:
        place = self._place(candidate)
        if self.repo and candidate.commit and exists(place / "checkout"):
            git_output(self.repo, "worktree", "remove", "--force", "--force", str(place / "checkout"))
        for part in ("checkout", "venv", "caches"):
            shutil.rmtree(place / part, ignore_errors=True)

    def _run_git(self, arguments: list[str], log: Path) -> None:
        environment = git_environment(self.repo) if self.repo else None
        if environment is None:
            raise SetupError(f"--repo: got {self.repo}, whose configuration git (2.31 or newer) cannot read")
        _run([*GIT, "-C", str(self.repo), *arguments], log, None, environment)

    def _inside(self, candidate: Candidate) -> tuple[Path, dict[str, str]]:
        """Where its setup runs, and with which variables: not with the packages of who calls."""
        place = self._place(candidate)
        env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        env |= {"VIRTUAL_ENV": str(place / "venv"), "PATH": f"{place / 'venv' / 'bin'}:{env.get('PATH', '')}"}
        return (place / "checkout" if candidate.commit else Path.cwd()), env

    def _has_venv(self, candidate: Candidate) -> bool:
        return bool(self.setup or candidate.requirement)

    def _made_of(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "commit": candidate.commit,
            "repo": str(self.repo) if candidate.commit else None,
            "requirement": candidate.requirement,
            "setup": self.setup,
            "directory": str(Path.cwd()) if candidate.requirement and self.setup else None,
            "python": self.python,
        }

    def _place(self, candidate: Candidate) -> Path:
        content = json.dumps(self._made_of(candidate), sort_keys=True).encode()
        folder = f"{candidate.arm}-{hashlib.sha256(content).hexdigest()[:12]}"
        return Path(os.path.realpath(self.runs_dir)) / FOLDER / folder


def environments_for(
    recipe: CommandRecipe, runs_dir: Path, repo: Path | None, setup: str | None
) -> Environments:
    """Raises RecipeError where nothing of a recipe's command would follow the candidate."""
    trainer = recipe.trainer
    if repo is not None and setup is None and "checkout" not in trainer.parameters:
        raise RecipeError(Code.BISECT_NEEDS_CHECKOUT(recipe=recipe.name))
    python = shutil.which(trainer.python or sys.executable)
    if python is None:
        raise RecipeError(Code.PYTHON_NOT_FOUND(recipe=recipe.name, python=trainer.python))
    return Environments(
        runs_dir=runs_dir,
        repo=repo,
        setup=setup,
        python=python,
        names_checkout="checkout" in trainer.parameters,
    )


def _literal(path: Path) -> str:
    """A path in a template."""
    return re.sub(r"([{}])", r"\1\1", str(path))


def _run(argv: list[str], log: Path, directory: Path | None, env: dict[str, str] | None) -> None:
    with open_log(log) as file:
        try:
            program = (
                argv if env is None else [shutil.which(argv[0], path=env.get("PATH")) or argv[0], *argv[1:]]
            )
            done = subprocess.run(
                program, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        except OSError as error:
            raise SetupError(f"{argv[0]}: {error.strerror}") from None
    if done.returncode:
        said = " ".join(log.read_bytes()[-4 * MOST_TAIL :].decode(errors="replace").split())[-MOST_TAIL:]
        raise SetupError(display_safe(f"exit code {done.returncode}: {said}; all of it: {log}"))
