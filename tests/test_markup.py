"""Names that hold markup, emoji codes or control characters: every command prints them as they are."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from abrun.cli import main
from abrun.messages.codes import Code
from abrun.report import doctor
from abrun.runs.redaction import printable
from tests.commands import all_commands
from tests.verdict.simulate import edit_rows, fail, write_experiment

NAMES = ["v[/x]", "v[bold]w", "v[gsm8k]", "v:smile:w", "v[link=http://x]w", "[red]v[/red]", "v\x1b[31mw"]
Command = Callable[[str], list[str]]
RECIPE = {
    "name": "small",
    "trainer": {
        "type": "command",
        "argv": ["{python}", "x.py", "{run_dir}/m.jsonl"],
        "metrics": {"format": "jsonl", "path": "{run_dir}/m.jsonl"},
    },
    "steps": 20,
    "arms": {"baseline": {}, "treatment": {"steps": 21}},
    "seeds": [0, 1],
}
# Each command with a name in a metric, a message, a prompt, a completion, a folder or an argument.
COMMANDS: dict[str, list[Command]] = {
    "demo": [lambda name: ["-o", f"logs/{name}"]],
    "init": [lambda name: ["--kind", name]],
    "recipes": [lambda name: [name]],
    "launch": [
        lambda name: ["recipe.yaml", "--dry-run"],
        lambda name: [f"{name}.yaml"],
        lambda name: ["recipe.yaml", "--launcher", name],
    ],
    "watch": [lambda name: ["stored", "--runs-dir", f"runs/{name}"]],
    "status": [
        lambda name: ["stored", "--runs-dir", f"runs/{name}"],
        lambda name: ["--runs-dir", f"{name}-empty"],
    ],
    "stop": [lambda name: [name]],
    "logs": [lambda name: [f"runs/{name}/stored/treatment/seed-0"], lambda name: [f"nowhere/{name}"]],
    "wandb-sync": [lambda name: [name]],
    "compare": [
        lambda name: [f"runs/{name}/stored", "--no-step-one"],
        lambda name: [f"logs/{name}"],
        lambda name: [f"logs/{name}", "--unpaired"],
    ],
    "gate": [
        lambda name: [
            f"logs/{name}/a",
            "--against",
            f"{name}.jsonl",
            "--start",
            "--claim",
            f"{name}:all:better 0",
        ],
        lambda name: [f"logs/{name}/b", "--against", f"{name}.jsonl"],
        lambda name: [f"nowhere/{name}", "--against", f"nowhere/{name}.jsonl"],
    ],
    "reference save": [lambda name: [f"nowhere/{name}", "--output", "frozen.json"]],
    "reference show": [lambda name: [f"nowhere/{name}"]],
    "reference add": [lambda name: [f"nowhere/{name}", name]],
    "power": [lambda name: ["recipe.yaml"], lambda name: [f"{name}.yaml"]],
    "faults": [lambda name: [name]],
    "faults show": [lambda name: [name]],
    "completions": [
        lambda name: [f"dump/{name}"],
        lambda name: [f"dump/{name}", "--against", "dump/plain"],
        lambda name: [f"nowhere/{name}"],
    ],
    "faults run": [lambda name: [f"{name}.yaml"]],
    "memory-profile": [lambda name: [f"{name}.yaml"]],
    "audit": [lambda name: [f"nowhere/{name}"]],
    "logprob-diff": [lambda name: [f"nowhere/{name}"]],
    "trace": [lambda name: [f"{name}.yaml"]],
    "doctor": [lambda name: []],
    "skill": [],  # prints a file
    "bisect": [lambda name: [f"{name}.yaml"]],
}


def write_inputs(name: str) -> None:
    stored = write_experiment(
        Path("runs") / name / "stored", steps=12, seeds=[0, 1], controls={"aa_reruns": 0}
    )
    for run in stored.glob("*/seed-*"):
        edit_rows(run, lambda row: row.update({name: row["train/reward"]}))
    fail(stored / "treatment/seed-0", after_steps=6, message=f"ValueError: {name}")
    for arm in ("a", "b"):
        for seed in (0, 1):
            folder = Path("logs") / name / arm / f"seed-{seed}"
            folder.mkdir(parents=True)
            rows = ({"step": step, name: step / 20 + seed / 100} for step in range(1, 21))
            (folder / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder in (Path("dump") / name, Path("dump/plain")):
        folder.mkdir(parents=True)
        row = {"input": f"prompt {name}", "output": f"completion {name}", "score": 0.5, "step": 1}
        (folder / "1.jsonl").write_text(json.dumps(row) + "\n")
    claim = {"metric": name, "window": "last 20%", "margin": 0.05, "sigma": 0.01, "correlation": 0.5}
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "compare": {"claims": [claim]}}))
    (Path(f"{name}-empty")).mkdir(parents=True)


def test_every_command_is_walked() -> None:
    commands = {name for name, each in all_commands() if getattr(each, "invoke_without_command", True)}
    assert commands == COMMANDS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_they_are(tmp_path: Path, monkeypatch, capsys, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    part = doctor.DoctorItem(kind="engine", name=name, refusal=Code.FOREIGN_TEXT(text=f"lacks {name}"))
    diagnosis = doctor.Diagnosis(
        python="3",
        processor=name,
        cores=1,
        gpus=(),
        versions={"torch": name},
        parts=(part,),
        warnings=(Code.FOREIGN_TEXT(text=name),),
    )
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnosis)
    write_inputs(name)
    as_printed = {printable(name), name.replace("\x1b", "?"), str(Path(name))}
    wrong = []
    for command, variants in COMMANDS.items():
        for arguments in variants:
            monkeypatch.setattr(sys, "argv", ["abrun", *command.split(), *arguments(name)])
            with pytest.raises(SystemExit):  # whatever else ends it would be a traceback
                main()
            printed = "".join(capsys.readouterr())
            assert "\x1b" not in printed and "Traceback" not in printed
            if not any(text in printed for text in as_printed):
                wrong.append((command, arguments(name), printed[-600:]))
    assert not wrong, "\n".join(map(str, wrong))
