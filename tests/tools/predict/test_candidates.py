"""The search side by side decides as the rule does that asks one question after the other."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import LaunchError
from abrun.launch.memory.profile import GIB
from abrun.messages.codes import Code
from abrun.recipe.experiment import load_recipe
from abrun.recipe.run import OwnRunConfig
from abrun.tools.predict import auto, probes
from abrun.tools.predict.auto import CandidateSearch, NotMeasured
from abrun.tools.predict.facts import Answer
from abrun.tools.predict.probes import Probe
from tests.tools.predict.fake_pool import ForgetfulPool

SMALL = Path(__file__).parents[2] / "launch" / "small.yaml"
DEVICE = 100 * GIB
ARMS = ("baseline", "treatment")
Table = dict[int, dict[str, Any]]  # by candidate: GiB by arm, or "error"


def sequential(groups: list[list[int]], predicted: Table, measured: Table | None) -> Any:
    """The rule as it was when it asked one question after the other: choice and trials, or an error."""
    trials: list[int] = []
    peaks: dict[int, Any] = {}

    def predict(number: int) -> None:
        if number not in trials:
            if "error" in predicted[number].values():
                raise LaunchError(Code.FOREIGN_TEXT(text=f"predict {number}"))
            trials.append(number)

    def highest(number: int) -> tuple[str, float]:
        return max(predicted[number].items(), key=lambda item: item[1])

    def fits(number: int) -> bool:
        if number in peaks:
            return not isinstance(peaks[number], str) and peaks[number] <= 95
        return highest(number)[1] <= 90

    def measure(number: int) -> None:
        assert measured is not None
        if number not in peaks:
            peaks[number] = measured[number][highest(number)[0]]
            if peaks[number] == "error":
                raise LaunchError(Code.FOREIGN_TEXT(text=f"measure {number}"))

    def attempt(number: int) -> bool:
        predict(number)
        if fits(number) and measured is not None:
            measure(number)
        return fits(number)

    try:
        for group in groups:
            if attempt(group[0]):
                return group[0], trials
            if len(group) > 1:
                predict(group[-1])
                if fits(group[-1]):
                    for number in group[1:]:
                        if attempt(number):
                            return number, trials
        last = groups[-1][-1]
        predict(last)
        hopeless = last in peaks and isinstance(peaks[last], str)
        hopeless = hopeless or (last not in peaks and highest(last)[1] * 0.9 > 100)
        if measured is not None and not hopeless:
            measure(last)
        return last, trials
    except LaunchError as error:
        return str(error)


def config_of(number: int, arm: str) -> OwnRunConfig:
    config = CONFIG.model_copy(
        update={"model": CONFIG.model.model_copy(update={"system_prompt": f"{number}"})}
    )
    return config.model_copy(update={"steps": ARMS.index(arm) + 1, "warm_start": None})


CONFIG: OwnRunConfig = load_recipe(SMALL).run_config("baseline")  # type: ignore[assignment]


def search(groups: list[list[int]], predicted: Table, measured: Table | None, order: random.Random) -> Any:
    asked: list[Probe] = []

    def respond(probe: Probe) -> Answer | Exception:
        number = int(probe.config.model.system_prompt or "")
        table = predicted if probe.kind == "predicted" else measured
        assert table is not None
        value = table[number][probe.arm]
        if value == "error":
            verb = {"predicted": "predict", "measured": "measure"}[probe.kind]
            return LaunchError(Code.FOREIGN_TEXT(text=f"{verb} {number}"))
        if probe.kind == "predicted":
            by_phase = {"backward": {"activations": int(value * GIB)}}
            return {"length": 8, "num_sequences": 1, "by_phase": by_phase, "experts": False, "vllm": None}
        ran_out = "backward" if value == "out" else None
        peak_bytes = 0 if value == "out" else int(value * GIB)
        return {"phase": "x", "peak_bytes": peak_bytes, "reserved_bytes": None, "out_of_memory": ran_out}

    pool = ForgetfulPool(respond, asked, order=order)
    longest: Answer = {"longest": 8, "max_positions": None}
    try:
        with pool:
            trials = CandidateSearch(
                [[{"number": number} for number in group] for group in groups],
                lambda values: {arm: config_of(values["number"], arm) for arm in ARMS},
                dict.fromkeys(ARMS, longest),
                DEVICE,
                None if measured is None else ["a GPU"],
                pool,
            ).run()
    except NotMeasured as failure:
        return str(failure.error)
    except LaunchError as error:
        return str(error)
    choice = trials[-1].values["number"]
    return choice, [trial.values["number"] for trial in trials]


@pytest.mark.parametrize("seed", range(3))
def test_every_order_of_answers_decides_as_one_question_after_the_other(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    keys: dict[Any, str] = {}

    def make_key(kind: str, config: OwnRunConfig, job: Any, *_: Any) -> str:  # the real one takes 1 ms
        return keys.setdefault((kind, config.model.system_prompt, config.steps, str(job)), f"key {len(keys)}")

    def keep_steps(kind: Any) -> Any:
        return lambda arm, config, *size, **_: Probe(
            kind=kind,
            key=make_key(kind, config, size),
            arm=arm,
            config=config,
            job={"lengths": [8], "num_sequences": 1},
        )

    monkeypatch.setattr(auto, "ask_step", keep_steps("predicted"))
    monkeypatch.setattr(auto, "ask_measured", keep_steps("measured"))
    monkeypatch.setattr(probes, "store_answer", lambda *_: None)
    monkeypatch.setattr(probes, "usable_cores", lambda: rng.randint(1, 9))
    outcomes = set()
    for _ in range(400):
        numbers = itertools.count()
        groups = [[next(numbers) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 3))]
        count = next(numbers)
        predicted: dict[int, dict[str, Any]] = {
            n: {arm: rng.choice([50, 89, 91, 105, 112, 130]) + rng.random() for arm in ARMS}
            for n in range(count)
        }
        measured: dict[int, dict[str, Any]] = {
            n: {arm: rng.choice([50, 94, 94, 96, "out"]) for arm in ARMS} for n in range(count)
        }
        for table in (predicted, measured):
            if rng.random() < 0.2:
                table[rng.randrange(count)][rng.choice(ARMS)] = "error"
        given = measured if rng.random() < 0.7 else None
        expected = sequential(groups, predicted, given)
        found = search(groups, predicted, given, rng)
        if not isinstance(expected, str):  # the choice is listed last
            choice, trials = expected
            expected = choice, [*(trial for trial in trials if trial != choice), choice]
        assert found == expected
        outcomes.add(expected if isinstance(expected, str) else expected[0])
    assert len(outcomes) > 10
