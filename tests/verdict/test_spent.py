"""Device time by purpose, against a count second by second of what random launches did."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from abrun.messages import sentence
from abrun.recorded.stored import load_experiment
from abrun.report.comparing import compare
from abrun.verdict.spent import Spent, measure_spent
from abrun.verdict.verdict_file import parse_verdict_file
from tests.verdict.simulate import write, write_experiment

STEPS = 40
MACHINE = {"host": "node-1", "boot_id": "b", "pid_namespace": "p"}


@dataclass
class Second:
    """What one second of a start went into: a purpose, and the step that it worked on."""

    purpose: str
    step: int = 0


@dataclass
class WrittenStart:
    """One start of a run, second by second."""

    began_s: int
    device: str
    launcher: int
    seconds: list[Second] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False

    @property
    def ended_s(self) -> int:
        return self.began_s + len(self.seconds)


def write_start(
    random: Random, began_s: int, device: str, launcher: int, first: int, last: int
) -> WrittenStart:
    """A start that works on the steps from `first` to `last`; it finishes with the last step of all."""
    start = WrittenStart(began_s, device, launcher, finished=last == STEPS)
    start.seconds += [Second("start_up")] * random.randint(1, 9)
    checkpoint_s = 0
    for step in range(first, last + 1):
        generation_s, update_s = random.randint(0, 3), random.randint(1, 3)
        start.seconds += [Second("generation", step)] * generation_s + [Second("step", step)] * update_s
        row = {
            "step": step,
            "timing/train/total_step_time_s": generation_s + update_s + checkpoint_s,
            "timing/train/generation_s": generation_s,
        }
        row |= {"timing/train/checkpointing_s": checkpoint_s} if checkpoint_s else {}
        if random.random() < 0.1:
            validation_s = random.randint(1, 4)
            row["timing/validation/total_s"] = validation_s
            start.seconds += [Second("other")] * validation_s
        row["time_s"] = start.ended_s
        start.rows.append(row)
        checkpoint_s = random.randint(1, 3) if random.random() < 0.1 and step < last else 0
        start.seconds += [Second("other")] * checkpoint_s  # recorded with the next step
    start.seconds += [Second("other" if start.finished else "lost")] * random.randint(0, 5)
    return start


def random_starts(random: Random, slots: dict[tuple[str, int], int], launcher: int) -> list[Any]:
    """The starts of one run, each on the first free slot: it may fail at its start, or later."""
    starts: list[WrittenStart] = []
    reached = 0
    while reached < STEPS:
        slot = min(slots, key=lambda slot: (slots[slot], slot))
        slots[slot] = max(slots[slot], starts[-1].ended_s if starts else 0) + random.randint(0, 4)
        kind = random.choice(["whole", "whole", "whole", "breaks", "at once"])
        if kind == "at once":
            start = WrittenStart(slots[slot], slot[0], launcher, [Second("lost")] * random.randint(1, 9))
        else:
            saved = max(0, reached - random.randint(0, 5))
            last = STEPS if kind == "whole" else random.randint(saved + 1, STEPS - 1)
            start = write_start(random, slots[slot], slot[0], launcher, saved + 1, last)
            reached = max(last, saved)
        starts.append(start)
        slots[slot] = start.ended_s
    return starts


def write_run(directory: Path, starts: list[WrittenStart], *, share: int) -> None:
    rows, launches = [], []
    for number, start in enumerate(starts, 1):
        status = "finished" if start.finished else "failed"
        times = {"started_s": start.began_s, "ended_s": start.ended_s, "status": status}
        launcher = {"pid": 100 + start.launcher, "process_started": "1", **MACHINE}
        launches.append(
            {
                **times,
                "launcher": launcher,
                "devices": [start.device],
                "runs_per_gpu": share,
                "attempts": number,
                **MACHINE,
            }
        )
        write(directory / f"attempts/{number:04d}.json", {**times, "pid": 7, **MACHINE})
        rows += [{**row, "attempt": number, "train/reward": 0.5} for row in start.rows]
    write(directory / "launch.json", {"launches": launches})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def seconds_of(runs: dict[str, list[WrittenStart]], share: int) -> Iterator[tuple[str, float]]:
    """Yield a purpose and device seconds for every second that a device was held."""
    for name, starts in runs.items():
        newest = {row["step"]: number for number, start in enumerate(starts) for row in start.rows}
        for number, start in enumerate(starts):
            has_use = any(newest[row["step"]] == number for row in start.rows)
            for second in start.seconds:
                purpose = second.purpose
                if second.step and newest[second.step] != number:
                    purpose = "lost"
                if not has_use:
                    purpose = "lost"
                yield "controls" if "aa" in name else purpose, 1 / share


def idle_seconds(runs: dict[str, list[WrittenStart]], share: int, *, on_cpu: bool) -> float:
    """Device seconds of each launch at which a device that it used had no run, or not all that share it."""
    idle = 0.0
    starts = [start for run in runs.values() for start in run]
    for launcher in {start.launcher for start in starts}:
        launched = [start for start in starts if start.launcher == launcher]
        clock = range(min(s.began_s for s in launched), max(s.ended_s for s in launched))
        busy = [sum(s.began_s <= now < s.ended_s for s in launched) for now in clock]
        devices = max(busy) if on_cpu else len({start.device for start in launched})
        idle += sum(devices - number / share for number in busy)
    return idle


@pytest.mark.parametrize("seed", range(8))
def test_the_parts_are_those_of_a_count_by_the_second(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    on_cpu, share = seed % 2 == 1, 1 if seed % 2 else random.choice([1, 2, 3])
    cluster = {} if on_cpu else {"gpus_per_node": 1}
    directory = write_experiment(tmp_path / "x", seeds=[0, 1, 2], controls={"aa_reruns": 1}, cluster=cluster)
    names = sorted(path.parent.relative_to(directory) for path in directory.glob("*/*/config.json"))
    runs: dict[str, list[WrittenStart]] = {}
    for launcher in (0, 1):  # the second one goes on a day later
        devices = ["cpu"] if on_cpu else ["0", "1"][: random.randint(1, 2)]
        width = random.randint(1, 3) if on_cpu else share
        slots = {(device, index): 1000 + 86400 * launcher for device in devices for index in range(width)}
        for name in names[launcher::2]:
            runs[str(name)] = random_starts(random, slots, launcher)
            write_run(directory / name, runs[str(name)], share=share)
    spent = measure_spent(load_experiment(directory))
    assert spent is not None and spent.device == ("CPU core" if on_cpu else "GPU")
    expected: dict[str, float] = dict.fromkeys(
        ("step", "generation", "start_up", "other", "lost", "controls"), 0.0
    )
    for purpose, seconds in seconds_of(runs, share):
        expected[purpose] += seconds
    measured = {
        "step": spent.steps_s - spent.generation_s,
        "generation": spent.generation_s,
        "start_up": spent.start_up_s,
        "other": spent.other_s,
        "lost": spent.lost_s,
        "controls": spent.controls_s,
    }
    assert measured == pytest.approx(expected)
    assert spent.idle_s == pytest.approx(idle_seconds(runs, share, on_cpu=on_cpu))
    assert spent.held_s == pytest.approx(sum(expected.values()) + spent.idle_s)
    assert spent.useful_share == pytest.approx((expected["step"] + expected["generation"]) / spent.held_s)


def spent_of(directory: Path) -> Spent:
    spent = measure_spent(load_experiment(directory))
    assert spent is not None
    return spent


def one_pair(folder: Path, *, began_s: int = 100, ended_s: int | None = 200, **launch: Any) -> Path:
    """A pair whose runs start at 100, take 40 steps of 2 s up to 190, and end at 200."""
    directory = write_experiment(
        folder / "x", seeds=[0], controls={}, cluster={"gpus_per_node": 1}, compare={}
    )
    for arm, device in (("baseline", "0"), ("treatment", "1")):
        run = directory / arm / "seed-0"
        rows = [
            {"step": step, "time_s": 110 + 2 * step, "timing/train/total_step_time_s": 2, "train/reward": 0.5}
            for step in range(1, STEPS + 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps({**row, "attempt": 1}) + "\n" for row in rows))
        times = {"started_s": began_s, "ended_s": ended_s, "status": "finished"}
        write(run / "attempts/0001.json", times)
        launcher = {"launcher": {"pid": 1, **MACHINE}, "devices": [device]} | launch
        write(run / "launch.json", {"launches": [{**times, **launcher, "attempts": 1}]})
    return directory


def test_a_pair_in_a_sentence_and_a_verdict_file_of_an_older_version(tmp_path: Path) -> None:
    directory = one_pair(tmp_path)
    content = compare(load_experiment(directory)).as_json()
    assert content["spent"] == {
        **{"device": "GPU", "held_s": 200.0, "useful_share": 0.8, "steps_s": 160.0, "generation_s": 0.0},
        **{"start_up_s": 20.0, "other_s": 20.0, "unknown_s": 0.0, "controls_s": 0.0, "warm_starts_s": 0},
        **{"lost_s": 0.0, "idle_s": 0.0},
    }
    text = "3.3 GPU-minutes: 80 % steps of compared runs, 10 % start-up, 10 % checkpoints, validation, exit"
    assert sentence(spent_of(directory).reason) == text
    assert parse_verdict_file(content, directory).spent == spent_of(directory)
    del content["spent"]
    assert parse_verdict_file(content, directory).spent is None


def test_devices_of_a_scheduler_are_held_while_a_run_is_on_them(tmp_path: Path) -> None:
    spent = spent_of(one_pair(tmp_path, devices=[]))
    assert (spent.held_s, spent.idle_s) == (200.0, 0.0)


def test_without_a_recorded_end_a_start_lasts_until_its_last_row(tmp_path: Path) -> None:
    spent = spent_of(one_pair(tmp_path, ended_s=None))
    assert (spent.held_s, spent.steps_s, spent.start_up_s) == (180.0, 160.0, 20.0)


def test_clocks_that_were_set_leave_no_negative_part(tmp_path: Path) -> None:
    spent = spent_of(one_pair(tmp_path, began_s=1000, ended_s=1050))
    assert (spent.held_s, spent.steps_s, spent.start_up_s, spent.other_s) == (100.0, 100.0, 0.0, 0.0)


@pytest.mark.parametrize("ended_s", [100 + 57 * 365 * 86_400, 50])
def test_after_a_jump_of_the_clock_a_start_takes_what_it_recorded(tmp_path: Path, ended_s: int) -> None:
    spent = spent_of(one_pair(tmp_path, ended_s=ended_s))
    assert (spent.held_s, spent.idle_s) == (160.0, 0.0)


def test_runs_without_step_times_have_no_useful_share(tmp_path: Path) -> None:
    directory = one_pair(tmp_path)
    for path in directory.glob("*/*/metrics.jsonl"):
        path.write_text(path.read_text().replace("timing/train/total_step_time_s", "another"))
    spent = spent_of(directory)
    assert spent.useful_share is None and spent.unknown_s == spent.held_s == 200.0
    assert sentence(spent.reason) == "3.3 GPU-minutes: 100 % runs without step times"


def test_a_run_whose_partner_failed_is_lost(tmp_path: Path) -> None:
    directory = one_pair(tmp_path)
    (directory / "treatment/seed-0/result.json").unlink()
    spent = spent_of(directory)
    assert (spent.lost_s, spent.steps_s) == (200.0, 0.0)


def test_a_warm_start_counts_for_the_experiment_that_made_it(tmp_path: Path) -> None:
    directory = one_pair(tmp_path)
    warm_start = tmp_path / "warm-starts/abc"
    launch = {"started_s": 40, "ended_s": 90, "status": "finished", "devices": ["0"], "attempts": 1}
    launch |= {"launcher": {"pid": 1, **MACHINE}}
    for path in directory.glob("*/*/config.json"):
        config = json.loads(path.read_text())
        write(path, {**config, "initial_weights": "../../../warm-starts/abc/checkpoints/final"})
        write(warm_start / "config.json", {**config, "arm": "warm-start"})
    write(warm_start / "launch.json", {"launches": [launch]})
    spent = spent_of(directory)
    assert (spent.warm_starts_s, spent.idle_s, spent.held_s) == (50.0, 70.0, 320.0)
    write(warm_start / "launch.json", {"launches": [{**launch, "launcher": {"pid": 2, **MACHINE}}]})
    assert spent_of(directory).held_s == 200.0
