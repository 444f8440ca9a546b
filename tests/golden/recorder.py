"""Runs a case in a folder of its own and returns its recording: names of files and their normalised text."""

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from jsonschema import Draft202012Validator

from abrun import cli
from abrun.report import comparing
from abrun.report.present.figures import FIGURE_FORMATS
from abrun.report.write import FORMATS, PAGE
from abrun.runs import redaction
from tests.golden.case import Build
from tests.golden.normal import Normaliser, figures, json_text

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"
FOLDER_LENGTH = 72  # of every temporary folder's path: tables are laid out before paths are replaced
KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE")
VARIABLES = {
    "COLUMNS": "120",
    "LINES": "50",
    "TERM": "dumb",
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "ABRUN_POLL_S": "0.02",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
}
REPORTS = ("verdict.json", "report.md", "report.html", "sensitivity.md")
VERDICT_SCHEMA = Draft202012Validator(json.loads((ROOT / "abrun/verdict/verdict.schema.json").read_text()))
PAGE_CODE = "page-code.txt"  # the hash of what all pages share
_BLOCK = re.compile(r'<script type="application/json" id="([^"]+)">(.*?)</script>', re.S)
_TITLE = re.compile(r"(?<=<title>).*?(?=</title>)", re.S)


def record(build: Build) -> dict[str, str]:
    """Run a case; return `terminal.txt` and the reports that its commands wrote."""
    recording = {"terminal.txt": ""}
    with _folder() as folder, _environment(folder):
        normaliser = Normaliser(folder, ROOT)
        commands = build(folder)
        number = 0
        while (words := next(commands, None)) is not None:
            number += 1
            before = _written_files(folder)
            output, errors, code = _run(words)
            recording["terminal.txt"] += f"$ {shlex.join(['abrun', *words])}\n"
            if output.startswith(("{", "[")) and "--json" in words:
                recording[f"{number}-output.json"] = json_text(json.loads(normaliser.text(output)))
                output = ""
            texts = {"": output, "--- standard error\n": errors}
            shown = [f"{heading}{text.rstrip()}\n" for heading, text in texts.items() if text.strip()]
            recording["terminal.txt"] += normaliser.text(f"{''.join(shown)}--- exit code {code}\n\n")
            for path, content in _written_files(folder).items():
                if before.get(path) != content:
                    name = path.name if number == 1 else f"{number}-{path.name}"
                    recording |= _recorded_file(name, normaliser.text(content.decode()))
    return recording


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    above = Path(os.path.realpath(tempfile.mkdtemp(prefix="golden-")))
    folder = above / "".ljust(FOLDER_LENGTH - len(str(above)) - 1, "x")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(above, ignore_errors=True)


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """The working folder, and the variables that could change an output, as on every machine."""
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ} | VARIABLES
    with contextlib.chdir(folder), mock.patch.dict(os.environ, variables, clear=True):
        time.tzset()
        try:
            yield
        finally:
            redaction.forget_hidden_values()
    time.tzset()


def _run(words: Sequence[str]) -> tuple[str, str, int]:
    """Run a command line in this process; return its output, its errors and its exit code."""
    output, errors = io.BytesIO(), io.BytesIO()
    formats = FORMATS if "figures" in words else tuple(set(FORMATS) - set(FIGURE_FORMATS))
    with (
        mock.patch.object(comparing, "writable_formats", lambda: formats),
        mock.patch.object(sys, "argv", ["abrun", *words]),
        mock.patch.object(sys, "stdout", io.TextIOWrapper(output, "utf-8", write_through=True)),
        mock.patch.object(sys, "stderr", io.TextIOWrapper(errors, "utf-8", write_through=True)),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            return output.getvalue().decode(), errors.getvalue().decode(), int(str(ended.code))
    raise AssertionError("the command line ends by exiting")


def _written_files(folder: Path) -> dict[Path, bytes]:
    """The files that a recording keeps: reports anywhere, and JSON in the folder itself."""
    paths = [*(path for name in REPORTS for path in folder.rglob(name)), *folder.glob("*.json")]
    return {path: path.read_bytes() for path in sorted(paths) if path.parts[-2:] != ("short", PAGE)}


def _recorded_file(name: str, text: str) -> dict[str, str]:
    if name.endswith(".html"):
        page, code = _page(text)
        return {f"{name}.json": json_text(page), PAGE_CODE: code}
    if not name.endswith(".json"):
        return {name: text}
    content = json.loads(text)
    if name.endswith("verdict.json"):
        VERDICT_SCHEMA.validate(content)
        content = _without_sentences(content)
    for environment in (entry["environment"] for entry in content.get("environments", [])):
        if environment.get("hosts") in (["HOST"], [socket.gethostname()]):  # of runs that were started here
            environment |= {"python": "VERSION", "devices": ["DEVICE"], "hosts": ["HOST"]}
    if content.get("declared_s") is not None:
        content["declared_s"] = "TIME"
    for entry in (content.get("ledger") or {}).get("entries", []):  # hashed with the time
        entry |= {"previous": "SHA256", "sha256": "SHA256"}
    for run in content.get("runs", []):  # of a frozen reference, which later comparisons read
        run["metrics"] = {metric: len(series["steps"]) for metric, series in run["metrics"].items()}
    return {name: json_text(content)}


def _without_sentences(content: Any) -> Any:
    """JSON without the sentences whose codes stand beside them: terminal.txt and report.md hold these."""
    if isinstance(content, list):
        return [_without_sentences(entry) for entry in content]
    if not isinstance(content, dict):
        return content
    stems = [name.rpartition("_code")[0] for name in content if name != "exit_code"]
    told = {"warning", *stems, *(f"{stem}s" for stem in stems)} - {"s", ""}
    return {name: _without_sentences(value) for name, value in content.items() if name not in told}


def _page(text: str) -> tuple[dict[str, Any], str]:
    """What a page holds, and the hash of the code and styles around that."""
    title = _TITLE.search(text)
    page: dict[str, Any] = {"title": title and title[0]}
    page |= {name: _block(name, json.loads(block)) for name, block in _BLOCK.findall(text)}
    page["report"].pop("content")  # which verdict.json holds
    code = _TITLE.sub("", _BLOCK.sub("", text))
    return page, hashlib.sha256(re.sub(r"\s+", " ", code).encode()).hexdigest() + "\n"


def _block(name: str, block: dict[str, Any]) -> dict[str, Any]:
    """A block of a page's data: a chart with the figures of all its values, the first one with its lines."""
    if "rows" not in block:
        return block
    about = (
        block if name == "chart-0" else {key: block[key] for key in ("metric", "unit", "windows", "notes")}
    )
    return {**about, "rows": figures([value for row in block["rows"] for value in row])}
