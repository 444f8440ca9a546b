"""The live view: what it shows, at the widths people have, and that it reads no line twice."""

import contextlib
import io
import json
import math
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from abrun import watch
from abrun.errors import StoreError
from abrun.messages.codes import Code
from abrun.runs.experiment import run_dir
from abrun.runs.files import read_json, write_json
from abrun.runs.launches import begin_launch, end_launch, write_config
from abrun.runs.layout import RunName
from abrun.runs.lines import LineParser, LineWriter
from abrun.runs.lock import launcher_lock
from abrun.runs.rundir import RunDir
from abrun.runs.state import RunState
from abrun.runs.writer import begin_attempt
from abrun.watch.reading import estimate_time_left_s
from tests.snapshot import Snapshot


def make_experiment(root: Path, **steps: int) -> Path:
    """An experiment of 60-step runs; `baseline_0=12` has made 12 steps and is running, 60 has finished."""
    experiment_dir = root / "demo"
    names = [RunName(arm=arm, seed=int(seed)) for arm, _, seed in (run.rpartition("_") for run in steps)]
    runs = [{"arm": name.arm, "seed": name.seed, "rerun": 0} for name in names]
    write_json(experiment_dir / "experiment.json", {"schema_version": 1, "runs": runs})
    for name, done in zip(names, steps.values(), strict=True):
        directory = run_dir(experiment_dir, name)
        write_json(directory / "config.json", {"config": {"steps": 60}})
        if done:
            running = {"status": "running", "started_s": time.time()}
            write_json(directory / "attempts/0001.json", running)
            add_steps(directory, 1, done)
        if done == 60:
            write_json(directory / "result.json", {})
    return experiment_dir


def add_steps(directory: Path, first: int, last: int, **values: float) -> None:
    writer = LineWriter(directory / "metrics.jsonl")
    for step in range(first, last + 1):
        row = {
            "step": step,
            "attempt": 1,
            "train/reward": step / 60,
            "train/token_mult_prob_error": 1.00021,
            "train/grad_norm": 0.531,
            "timing/train/total_step_time_s": 0.5,
            "memory/generation/peak_live_tensor_bytes": 40 * 2**20,
            "memory/forward_backward/peak_live_tensor_bytes": 84 * 2**20,
        }
        writer.write({**row, **{key.replace("__", "/"): value for key, value in values.items()}})
    writer.close()
    write_json(directory / "heartbeat.json", {"time_s": time.time(), "step": last})


def drawn(experiment_dir: Path, width: int, height: int | None = None) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    runs = watch.ExperimentReader(experiment_dir).read()
    console.print(watch.render(experiment_dir.name, runs, width, height))
    return console.export_text()


def test_the_table_shows_every_column_of_a_run(tmp_path: Path) -> None:
    lines = drawn(make_experiment(tmp_path, baseline_0=60, treatment_0=30, baseline_1=0), 120).splitlines()
    assert lines[0].split() == ["demo", "1", "finished", "1", "running", "1", "pending"]
    headings = ["seed", "arm", "status", "step", "reward", "prob_error", "norm", "memory", "time", "elapsed"]
    assert lines[2].split() == [*headings, "ETA"]
    running = lines[4].split()  # the seed stands once, before the first run of it
    assert running[:4] == ["treatment", "running", "30/60", "0.500"]
    assert running[5:] == ["1.0002", "0.531", "84", "MiB", "0.50", "s", "0:00", "0:15"]
    done, to_come = running[4].rstrip("·"), running[4].count("·")
    assert set(done) <= set("▁▂▃▄▅") and done[0] == "▁" and len(done) == to_come > 5  # half of the steps
    assert "90/180 steps" in lines[-1] and "50%" in lines[-1] and "0:45 left" in lines[-1]


def test_runs_without_rewards_are_followed_by_their_loss(tmp_path: Path) -> None:
    root = make_experiment(tmp_path, baseline_0=0)
    directory = root / "baseline" / "seed-0"
    with contextlib.closing(LineWriter(directory / "metrics.jsonl")) as writer:
        for step in (30, 60):
            writer.write({"step": step, "train/loss": 0.8 - 0.005 * step})
    write_json(directory / "heartbeat.json", {"time_s": time.time(), "step": 60})
    lines = drawn(root, 120).splitlines()
    assert lines[2].split()[4] == "loss" and "0.500" in lines[3] and "█▁" in lines[3]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_is_wider_than_the_terminal_nor_cut(tmp_path: Path, width: int) -> None:
    text = drawn(make_experiment(tmp_path, baseline_0=60, treatment_0=30, baseline_1=0, treatment_1=0), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text and text.count("\n") == 8


def test_many_runs_fit_into_a_low_terminal_those_at_work_first(tmp_path: Path) -> None:
    runs = {f"baseline_{seed}": 60 for seed in range(20)} | {"treatment_0": 30, "treatment_1": 12}
    runs |= {f"other_{seed}": 0 for seed in range(20)}
    lines = drawn(make_experiment(tmp_path, **runs), 100, height=16).splitlines()
    assert len(lines) <= 16
    shown = [line.split()[:3] for line in lines[3:-2]]
    assert ["0", "treatment", "running"] in shown and ["1", "treatment", "running"] in shown
    left_out = lines[-2].split()
    assert left_out[0] == "and" and int(left_out[1]) + int(left_out[3]) + len(shown) == 42


def test_the_peak_memory_is_the_run_s_and_not_the_last_step_s(tmp_path: Path) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=10)
    peak = {"memory__forward_backward__peak_live_tensor_bytes": 500.0 * 2**20}
    add_steps(experiment_dir / "baseline" / "seed-0", 11, 11, **peak)
    reader = watch.ExperimentReader(experiment_dir)
    reader.read()
    peak = dict.fromkeys(peak, math.nan)
    add_steps(experiment_dir / "baseline" / "seed-0", 12, 12, **peak)
    add_steps(experiment_dir / "baseline" / "seed-0", 13, 13)
    (run,) = reader.read()
    assert run.peak_bytes == 500 * 2**20 and run.step == 13


def test_the_time_left_counts_the_start_ups_of_runs_to_come(tmp_path: Path) -> None:
    """Two at work, 0.5 s a step: 15 s of one, and of the other, which has no step yet, what its arm takes."""
    runs = {"baseline_0": 60, "treatment_0": 30, "baseline_1": 0, "treatment_1": 0}
    experiment_dir = make_experiment(tmp_path, **runs)
    now = time.time()

    def begin(run: str, ago_s: float, status: str = "running") -> None:
        attempt = {"status": status, "started_s": now - ago_s}
        write_json(experiment_dir / run / "attempts/0001.json", attempt)

    begin("baseline/seed-0", 200, "finished")
    first_step = {"step": 1, "attempt": 2, "time_s": now - 159.5, "timing/train/total_step_time_s": 0.5}
    with contextlib.closing(LineWriter(experiment_dir / "baseline" / "seed-0" / "metrics.jsonl")) as writer:
        writer.write(first_step)
    begin("treatment/seed-0", 100)
    begin("baseline/seed-1", 10)
    reader = watch.ExperimentReader(experiment_dir)
    assert [run.start_up_s for run in reader.read()] == [pytest.approx(40), None, None, None]
    # treatment-0 ends after 15 s, and treatment-1 after 40 + 30 s more; baseline-1 after 40 - 10 + 30 s
    assert estimate_time_left_s(reader.read()) == pytest.approx(85, abs=1)
    begin("treatment/seed-1", 10)
    assert estimate_time_left_s(reader.read()) == pytest.approx(60, abs=1)
    begin("treatment/seed-1", 10, "failed")
    assert estimate_time_left_s(reader.read()) == pytest.approx(60, abs=1)


def test_a_run_without_a_step_is_starting(tmp_path: Path) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0, treatment_0=3)
    attempt = {"status": "running", "started_s": time.time() - 65}
    write_json(experiment_dir / "baseline/seed-0/attempts/0001.json", attempt)
    lines = drawn(experiment_dir, 120).splitlines()
    assert lines[0].split() == ["demo", "1", "starting", "1", "running"]
    assert lines[3].split()[:4] == ["0", "baseline", "starting", "0/60"]
    assert lines[3].split()[4].strip("·") == "" and lines[3].split()[-1] == "1:05"
    assert "1:05 elapsed" in lines[-1]


def test_nan_is_seen(tmp_path: Path) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=10, treatment_0=10)
    add_steps(
        experiment_dir / "treatment" / "seed-0", 11, 12, train__reward=math.nan, train__grad_norm=math.inf
    )
    row = next(line for line in drawn(experiment_dir, 120).splitlines() if "treatment" in line)
    assert "nan" in row and "inf" in row and "!" in row


def test_failures_and_corrupt_lines_are_said_below_the_table(tmp_path: Path) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=10, treatment_0=10)
    failed = {"status": "failed", "started_s": 0, "message": "out of [memory]"}
    write_json(experiment_dir / "baseline" / "seed-0" / "attempts/0001.json", failed)
    with (experiment_dir / "treatment" / "seed-0" / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    text = drawn(experiment_dir, 200)
    assert "baseline/seed-0: out of [memory]" in text
    assert "treatment/seed-0: " in text and "line 11: got 'garbage'" in text


def with_warm_start(run_dir: Path) -> Path:
    """Of that run, and at work."""
    warm_start = run_dir.parents[2] / "warm-starts" / "abc"
    config = {"initial_weights": "../../../warm-starts/abc/checkpoints/final", "config": {"steps": 60}}
    write_json(run_dir / "config.json", config)
    write_json(warm_start / "config.json", {"config": {"steps": 100}})
    write_json(warm_start / "attempts/0001.json", {"status": "running", "started_s": time.time()})
    return warm_start


def test_a_warm_start_is_shown_until_it_is_finished(tmp_path: Path) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0)
    warm_start = with_warm_start(experiment_dir / "baseline" / "seed-0")
    write_json(warm_start / "heartbeat.json", {"time_s": time.time(), "step": 42})
    assert ["warm-start", "running", "42/100"] in [
        line.split()[:3] for line in drawn(experiment_dir, 120).splitlines()
    ]
    write_json(warm_start / "result.json", {})
    assert "warm-start" not in drawn(experiment_dir, 120)


def test_a_run_that_failed_again_before_a_step_has_no_elapsed_time(tmp_path: Path) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=3, treatment_0=3)
    add_steps(experiment_dir / "baseline/seed-0", 4, 4, time_s=time.time() - 7000)
    ended = {"status": "failed", "started_s": time.time() - 60, "ended_s": time.time(), "message": "x"}
    write_json(experiment_dir / "baseline/seed-0/attempts/0002.json", ended)
    row = drawn(experiment_dir, 140).splitlines()[3]
    assert "failed" in row and not re.search(r"-\d+:", row)


def test_a_deleted_warm_start_is_shown_while_a_run_waits_for_it(tmp_path: Path) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=60)
    config = {"initial_weights": "../../../warm-starts/gone/checkpoints/final", "config": {"steps": 60}}
    write_json(experiment_dir / "baseline" / "seed-0" / "config.json", config)
    assert "warm-start" not in drawn(experiment_dir, 120)
    write_json(experiment_dir / "baseline" / "seed-0" / "attempts/0001.json", {"status": "pending"})
    (experiment_dir / "baseline" / "seed-0" / "result.json").unlink(missing_ok=True)
    assert "warm-start" in drawn(experiment_dir, 120)


def test_a_run_whose_directory_was_removed_is_still_to_do(tmp_path: Path) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=60, treatment_0=60)
    content = read_json(experiment_dir / "experiment.json")
    write_json(experiment_dir / "experiment.json", {**content, "recipe": {"steps": 60}})
    shutil.rmtree(experiment_dir / "treatment")
    text = drawn(experiment_dir, 120)
    assert "0/60" in text and "60/120 steps" in text


class SlowQueue:
    """A scheduler that takes three seconds to say that nothing of an experiment is known to it."""

    silent = "no answer for 3 s"

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def state_of(self, state: RunState) -> RunState:
        self.now[0] += 3.0
        return state


def test_a_scheduler_that_does_not_answer_is_not_asked_about_every_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"e{number}" for number in range(5)]
    for name in names:
        make_experiment(tmp_path, baseline_0=0).rename(tmp_path / name)
    make_experiment(tmp_path, baseline_0=60)  # finished: nobody is asked
    asked, now = list[str](), [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])

    def find_jobs(experiment_dir: Path) -> SlowQueue:
        asked.append(experiment_dir.name)
        return SlowQueue(now)

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(watch.render_experiments(tmp_path, find_jobs))
    text = console.export_text()
    assert asked == names and now == [6.0]
    assert text.count("no answer for 3 s") == 1


def test_the_log_of_a_run_whose_turn_comes_is_waited_for(tmp_path: Path) -> None:
    """A launcher is at work, and the run has not begun: whoever follows its log sees all of it."""
    experiment_dir = make_experiment(tmp_path, baseline_0=0)
    run = RunDir(experiment_dir / "baseline" / "seed-0")
    name = RunName(arm="baseline", seed=0)
    write_config(run, "demo", name, {"steps": 60})
    with launcher_lock(experiment_dir), ThreadPoolExecutor() as pool:
        lines = pool.submit(list, watch.read_log(run.path, lambda experiment_dir: None, follow=True))
        time.sleep(0.2)
        assert not lines.done()
        writer = begin_attempt(run)
        run.log.write_text("step 1\n")
        writer.finish(60)
        assert lines.result(10) == ["step 1\n"]
    shutil.rmtree(run.path / "attempts")
    (run.path / "result.json").unlink()
    assert list(watch.read_log(run.path, lambda experiment_dir: None, follow=True)) == ["step 1\n"]


def test_in_the_place_of_an_empty_log_is_what_is_recorded(tmp_path: Path, snapshot: Snapshot) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0)
    run, name = RunDir(experiment_dir / "baseline" / "seed-0"), RunName(arm="baseline", seed=0)
    write_config(run, "demo", name, {"steps": 60})

    def said() -> list[str]:
        return list(watch.read_log(run.path, lambda experiment_dir: None, follow=False))

    snapshot(said())
    begin_launch(run, (), None)
    end_launch(run, "failed", Code.FOREIGN_TEXT(text="not started: no \x1b[31mreason"))
    run.log.write_text("a line\n")
    assert said() == ["a line\n"]


def test_an_experiment_and_an_arm_have_no_log(tmp_path: Path, snapshot: Snapshot) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=60, treatment_0=3)
    for directory in (experiment_dir, experiment_dir / "treatment"):
        with snapshot.refused(StoreError):
            list(watch.read_log(directory, lambda experiment_dir: None, follow=False))


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=10, treatment_0=60)
    parsed: list[bytes] = []
    parse = LineParser.parse
    monkeypatch.setattr(
        LineParser, "parse", lambda *arguments: (parsed.append(arguments[1]), parse(*arguments))[1]
    )
    reader = watch.ExperimentReader(experiment_dir)
    assert [run.step for run in reader.read()] == [10, 60]
    assert len(parsed) == 70
    add_steps(experiment_dir / "baseline" / "seed-0", 11, 13)
    assert [run.step for run in reader.read()] == [13, 60]
    assert [json.loads(line)["step"] for line in parsed[70:]] == [11, 12, 13]
    # Steps that are done again after a resume replace the old ones
    add_steps(experiment_dir / "baseline" / "seed-0", 12, 12, train__reward=0.9)
    rewards = reader.read()[0].curves["train/reward"]
    assert len(rewards) == 13 and rewards[11] == 0.9


def test_without_a_terminal_a_run_says_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0)
    directory = experiment_dir / "baseline" / "seed-0"
    output = io.StringIO()
    with watch.View(Console(file=output, width=60)) as view:
        view.follow(experiment_dir)
        view.tick(now=True)
        running = {"status": "running", "started_s": time.time()}
        write_json(directory / "attempts/0001.json", running)
        view.tick(now=True)
        for step in range(1, 61):
            add_steps(directory, step, step)
            view.tick(now=True)
        write_json(directory / "result.json", {})
        view.say("a note on [baseline]")
    lines = [line.split(" ", 1)[1] for line in output.getvalue().splitlines()]
    assert lines[0] == "baseline/seed-0: started, 60 steps"
    assert [line.split(",")[0] for line in lines[1:5]] == [
        f"baseline/seed-0: step {step}/60" for step in (12, 24, 36, 48)
    ]
    assert lines[5] == "note on [baseline]"
    assert lines[6].startswith(
        "baseline/seed-0: finished, step 60/60, reward 1.000, token_mult_prob_error 1.0002"
    )
    assert len(lines) == 7


def test_an_end_before_this_view_is_printed_with_its_own_time(tmp_path: Path) -> None:
    directory = make_experiment(tmp_path, baseline_0=60) / "baseline/seed-0"
    for ended_s in (time.time() - 1, time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))):
        ended = {"status": "finished", "started_s": 1.0, "ended_s": ended_s}
        write_json(directory / "attempts/0001.json", ended)
        output = io.StringIO()
        with watch.View(Console(file=output, width=200)) as view:
            view.follow(directory.parents[1])
        clock = time.strftime("%H:%M:%S", time.localtime(ended_s))
        date = "2026-01-02 " * (clock == "03:04:05")
        assert output.getvalue().startswith(f"{date}{clock} baseline/seed-0: finished")


def test_on_a_terminal_the_table_is_redrawn_and_notes_stand_above_it(tmp_path: Path) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=10)
    output = io.StringIO()
    console = Console(file=output, width=100, height=30, force_terminal=True, color_system=None)
    with watch.View(console) as view:
        view.follow(experiment_dir)
        view.tick(now=True)
        assert "10/60" in output.getvalue()
        assert view.tick() == []  # not a second has passed
        view.say("a note on [baseline]")
        add_steps(experiment_dir / "baseline" / "seed-0", 11, 12)
    text = output.getvalue()
    assert (
        text.index("a note on [baseline]") < text.rindex("12/60") and "\x1b[?25h" in text
    )  # the cursor is back


def test_ctrl_c_leaves_no_stale_line(tmp_path: Path) -> None:
    """The terminal echoes ^C where the cursor stands: there has to be room, or it wraps."""
    experiment_dir = make_experiment(tmp_path, baseline_0=10)
    screen = Screen(width=100)
    console = Console(file=screen, width=100, height=30, force_terminal=True, color_system=None)
    with pytest.raises(KeyboardInterrupt), watch.View(console) as view:
        view.follow(experiment_dir)
        view.tick(now=True)
        screen.write("^C")
        view.tick(now=True)
        assert sum(line.startswith("demo") for line in screen.lines) == 1
        screen.write("^C^C")
        view.say("stopping 1 run")
        screen.write("^C")
        raise KeyboardInterrupt
    lines = [line.rstrip() for line in screen.lines]
    assert [line.split("  ")[0] for line in lines[:2]] == ["stopping 1 run", "demo"]
    assert "10/60 steps" in lines[-2] and lines[-1] == "" and "^C" not in "".join(lines)


class Screen(io.StringIO):
    """A terminal of some width and any height: what stands on it after all that was written."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.lines, self.row, self.column = width, [""], 0, 0

    def write(self, text: str) -> int:
        for control, number, letter, character in re.findall(r"(\x1b\[\??(\d*)([A-Za-z]))|([^\x1b])", text):
            if control:
                self.row -= int(number or 1) if letter == "A" else 0
                self.lines[self.row] = "" if letter == "K" else self.lines[self.row]
            elif character in "\r\n":
                self.column = 0
                self.row += character == "\n"
            else:
                if self.column == self.width:
                    self.row, self.column = self.row + 1, 0
                self._grow()
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1
            self._grow()
        return len(text)

    def _grow(self) -> None:
        self.lines += [""] * (self.row + 1 - len(self.lines))


def test_watching_ends_with_the_experiment_or_when_nobody_runs_it(tmp_path: Path, snapshot: Snapshot) -> None:
    output = io.StringIO()
    watch.watch(make_experiment(tmp_path / "done", baseline_0=60), Console(file=output))
    assert output.getvalue().endswith(f"finished: no report yet; abrun compare {tmp_path}/done/demo\n")
    reported = make_experiment(tmp_path / "judged", baseline_0=60)
    write_json(reported / "report/verdict.json", {"verdict": "MATCH", "exit_code": 0})
    watch.watch(reported, Console(file=output))
    assert output.getvalue().endswith(f"finished: MATCH (exit code 0); abrun compare {reported}\n")
    watch.watch(make_experiment(tmp_path / "left", baseline_0=60, treatment_0=0), Console(file=output))
    snapshot(output.getvalue())
