"""Checkout and virtual environment of each candidate, made once and named by a hash of their content."""

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

from abrun.errors import LaunchError, RecipeError
from abrun.launch.git import GIT, git_environment, git_output
from abrun.recipe.experiment import CommandRecipe
from abrun.runs.files import exists, is_directory, is_file, make_folder, open_log, write_json
from abrun.runs.lock import launcher_lock
from abrun.runs.redaction import display_safe
from abrun.tools.bisect.candidates import Candidate

FOLDER = ".environments"  # in the runs directory; not a valid name of an experiment
MADE, LOG = "made.json", "setup.log"
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "PYTHONPYCACHEPREFIX")
VENV = ("-I", "-m", "venv")  # -I: ignores modules of the working directory
CALLERS_PYTHON = ("PYTHONPATH", "PYTHONHOME")  # variables that a set-up does not get
MAX_TAIL = 300


class SetupError(LaunchError):
    """A candidate's environment cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Sets candidates up. Without `setup` or a package, all candidates share one interpreter."""

    runs_dir: Path
    repo: Path | None
    setup: str | None
    python: str  # the interpreter that makes the virtual environments
    names_checkout: bool  # True if the recipe's command has the parameter {checkout}

    def changes(self, candidate: Candidate) -> dict[str, Any]:
        """Return the configuration of an arm that runs a candidate, as dotted keys."""
        folder, changes = self._folder(candidate), dict[str, Any]()
        if candidate.commit and self.names_checkout:
            changes["trainer.parameters.checkout"] = str(folder / "checkout")
        if self._has_venv(candidate):
            changes["trainer.python"] = str(folder / "venv" / "bin" / "python")
            changes["trainer.env.VIRTUAL_ENV"] = _literal(folder / "venv")
            changes["trainer.env.PATH"] = f"{_literal(folder / 'venv' / 'bin')}:${{PATH}}"
        return changes | {
            f"trainer.env.{name}": _literal(folder / "caches" / name.lower()) for name in CACHES
        }

    def make(self, candidate: Candidate) -> None:
        """Set a candidate up, unless done before. Raises SetupError with the last lines of output."""
        folder = self._folder(candidate)
        make_folder(folder)
        with launcher_lock(folder):
            if is_file(folder / MADE):
                return
            self._clear(candidate)
            log = folder / LOG
            log.unlink(missing_ok=True)
            if self.repo and candidate.commit:
                git_env = git_environment(self.repo)
                if git_env is None:
                    raise SetupError(
                        f"--repo: got {self.repo}, whose configuration git (2.31 or newer) cannot read"
                    )
                add = ["worktree", "add", "--force", "--detach", str(folder / "checkout"), candidate.commit]
                _run([*GIT, "-C", str(self.repo), *add], log, None, git_env)

            if self._has_venv(candidate):
                _run([self.python, *VENV, str(folder / "venv")], log, None, None)
                directory = folder / "checkout" if candidate.commit else Path.cwd()
                env = {key: value for key, value in os.environ.items() if key not in CALLERS_PYTHON}
                env["VIRTUAL_ENV"] = str(folder / "venv")
                env["PATH"] = f"{folder / 'venv' / 'bin'}:{env.get('PATH', '')}"
                if self.setup:
                    _run(["sh", "-c", self.setup], log, directory, env)
                if candidate.requirement:
                    _run(["python", "-I", "-m", "pip", "install", candidate.requirement], log, directory, env)
            write_json(folder / MADE, self._identity(candidate))

    def remove(self, candidate: Candidate) -> None:
        """Remove a candidate's checkout and environment; keeps the log of a failed set-up."""
        folder = self._folder(candidate)
        if is_directory(folder):
            with launcher_lock(folder):
                was_made = is_file(folder / MADE)
                (folder / MADE).unlink(missing_ok=True)
                self._clear(candidate)
            if was_made:
                shutil.rmtree(folder, ignore_errors=True)

    def _clear(self, candidate: Candidate) -> None:
        folder = self._folder(candidate)
        if self.repo and candidate.commit and exists(folder / "checkout"):
            git_output(self.repo, "worktree", "remove", "--force", "--force", str(folder / "checkout"))
        for name in ("checkout", "venv", "caches"):
            shutil.rmtree(folder / name, ignore_errors=True)

    def _has_venv(self, candidate: Candidate) -> bool:
        return bool(self.setup or candidate.requirement)

    def _identity(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "commit": candidate.commit,
            "repo": str(self.repo) if candidate.commit else None,
            "requirement": candidate.requirement,
            "setup": self.setup,
            "directory": str(Path.cwd()) if candidate.requirement and self.setup else None,
            "python": self.python,
        }

    def _folder(self, candidate: Candidate) -> Path:
        content = json.dumps(self._identity(candidate), sort_keys=True).encode()
        folder = f"{candidate.arm}-{hashlib.sha256(content).hexdigest()[:12]}"
        return Path(os.path.realpath(self.runs_dir)) / FOLDER / folder


def environments_for(
    recipe: CommandRecipe, runs_dir: Path, repo: Path | None, setup: str | None
) -> Environments:
    """Return a recipe's environments. Raises RecipeError if its command does not depend on the candidate."""
    trainer = recipe.trainer
    if repo is not None and setup is None and "checkout" not in trainer.parameters:
        raise RecipeError(
            f"{recipe.name}: trainer.parameters.checkout: missing, but each candidate's checkout replaces "
            "it; add it and write {checkout} into argv, or install a checkout with --setup"
        )
    python = shutil.which(trainer.python or sys.executable)
    if python is None:
        raise RecipeError(f"{recipe.name}: trainer.python: got {trainer.python!r}, which does not exist")
    return Environments(
        runs_dir=runs_dir,
        repo=repo,
        setup=setup,
        python=python,
        names_checkout="checkout" in trainer.parameters,
    )


def _literal(path: Path) -> str:
    """Return a path with its braces escaped, for a template."""
    return re.sub(r"([{}])", r"\1\1", str(path))


def _run(argv: list[str], log: Path, directory: Path | None, env: dict[str, str] | None) -> None:
    with open_log(log) as file:
        try:
            program = (
                argv if env is None else [shutil.which(argv[0], path=env.get("PATH")) or argv[0], *argv[1:]]
            )
            process = subprocess.run(
                program, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        except OSError as error:
            raise SetupError(f"{argv[0]}: {error.strerror}") from None
    if process.returncode:
        log_tail = " ".join(log.read_bytes()[-4 * MAX_TAIL :].decode(errors="replace").split())[-MAX_TAIL:]
        raise SetupError(display_safe(f"exit code {process.returncode}: {log_tail}; full log: {log}"))
