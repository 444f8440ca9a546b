"""Search for the preferred candidate of `auto` values that fits into memory.

The rule asks one question after the other. While an answer is missing, the probes of all questions that may
follow run side by side; the rule starts again with every answer, so that their order changes no decision.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from abrun.errors import LaunchError
from abrun.recipe.run import OwnRunConfig
from abrun.tools.predict.facts import Answer
from abrun.tools.predict.peaks import MAX_ERROR, PeakPrediction, ask_step, read_prediction
from abrun.tools.predict.probes import Probe, ask_measured

# Share of device memory kept free above a measured peak, for fragmentation and memory outside of torch.
MEASURED_MARGIN = 0.05

Values = dict[str, Any]  # by dotted key


class MissingAnswer(Exception):
    """Raised by the rule where it needs the answers of these probes for a candidate."""

    def __init__(self, values: Values, probes: Sequence[Probe]) -> None:
        super().__init__()
        self.values, self.probes = values, probes


class NotMeasured(Exception):
    """Error of a measured step."""

    def __init__(self, arm: str, values: Values, error: LaunchError) -> None:
        super().__init__()
        self.arm, self.values, self.error = arm, values, error


class Pool(Protocol):
    """The part of abrun.tools.predict.probes.ProbePool that a search needs."""

    def answer(self, probe: Probe) -> Answer | None: ...

    def request(self, probes: Sequence[Probe]) -> None: ...

    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Candidate values and what is known about the arms' memory peaks with them."""

    values: Values
    device_bytes: int
    peaks: dict[str, dict[str, Any]]  # predicted, by arm
    error: float  # relative error by which a prediction may be too low
    measured: dict[str, Any] | None = None  # for the arm with the highest prediction

    @property
    def highest_peak(self) -> tuple[str, int]:
        """Arm with the highest predicted peak, and its bytes, including a sleeping engine."""
        total_bytes = {arm: peak["peak_bytes"] + peak["asleep_bytes"] for arm, peak in self.peaks.items()}
        return max(total_bytes.items(), key=lambda item: item[1])

    @property
    def margin(self) -> float:
        """Share of device memory to keep free."""
        return MEASURED_MARGIN if self.measured else self.error

    @property
    def ran_out(self) -> bool:
        return self.measured is not None and self.measured["out_of_memory"] is not None

    @property
    def fits(self) -> bool:
        used_bytes = self.highest_peak[1]
        if self.measured:
            used_bytes = self.measured["peak_bytes"] + self.peaks[self.measured["arm"]]["asleep_bytes"]
        return not self.ran_out and used_bytes <= (1 - self.margin) * self.device_bytes

    @property
    def is_hopeless(self) -> bool:
        """True if memory ran out, or would even if the prediction is too high."""
        return self.ran_out or (
            not self.measured and self.highest_peak[1] * (1 - MAX_ERROR) > self.device_bytes
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "values": self.values,
            "fits": self.fits,
            "highest_bytes": self.highest_peak[1],
            "peaks": self.peaks,
            "measured": self.measured,
        }


def choose_candidate(
    groups: Sequence[Sequence[Values]],
    fits: Callable[[Values], bool],
    is_predicted_to_fit: Callable[[Values], bool],
) -> Values | None:
    """Return the first candidate that fits, or None. `groups` are in order of preference.

    The last candidate of a group needs the least memory. If it does not fit, the rest is skipped.
    """
    for group in groups:
        if fits(group[0]):
            return group[0]
        if len(group) > 1 and is_predicted_to_fit(group[-1]):
            for values in group[1:]:
                if fits(values):
                    return values
    return None


class CandidateSearch:
    """Search over groups of candidates. `measured_gpus`: descriptions of the GPUs that measure a step, or
    None if no step is measured. `longest`: answers about the longest sequence, by arm.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Values]],
        make_configs: Callable[[Values], Mapping[str, OwnRunConfig]],
        longest: Mapping[str, Answer],
        device_bytes: int,
        measured_gpus: Sequence[str] | None,
        pool: Pool,
    ) -> None:
        self._groups, self._device_bytes, self._pool = groups, device_bytes, pool
        self._gpus, self._make_configs, self._longest = measured_gpus, make_configs, longest
        self._probes: dict[str, list[Probe]] = {}  # this and the next by formatted values
        self._tried: dict[str, Trial] = {}

    def run(self) -> list[Trial]:
        """Return the trials that led to the decision, in order; the last one is the choice.

        Without a candidate that fits this is the one with the least memory; measured if possible. Raises
        LaunchError or NotMeasured.
        """
        while True:
            self._tried = {}
            try:
                choice = self._decide()
                return [*(trial for trial in self._tried.values() if trial is not choice), choice]
            except MissingAnswer as missing:
                self._pool.request([*missing.probes, *self._list_later_probes(missing)])
                self._pool.wait()

    def _decide(self) -> Trial:
        values = choose_candidate(self._groups, self._fits, lambda values: self._predict(values).fits)
        if values is not None:
            return self._tried[format_values(values)]
        smallest = self._predict(self._groups[-1][-1])
        return smallest if self._gpus is None or smallest.is_hopeless else self._measure(smallest)

    def _fits(self, values: Values) -> bool:
        trial = self._predict(values)
        return self._measure(trial).fits if trial.fits and self._gpus is not None else trial.fits

    def _predict(self, values: Values) -> Trial:
        if (name := format_values(values)) not in self._tried:
            probes = self._ask_predicted(values)
            answers = [self._pool.answer(probe) for probe in probes]
            if missing := [probe for probe, answer in zip(probes, answers, strict=True) if answer is None]:
                raise MissingAnswer(values, missing)
            predictions = [
                read_prediction(probe, answer, self._device_bytes)
                for probe, answer in zip(probes, answers, strict=True)
                if answer is not None
            ]
            self._tried[name] = Trial(
                values=values,
                device_bytes=self._device_bytes,
                peaks=_peaks_as_json(predictions),
                error=max(prediction.max_underestimate for prediction in predictions),
            )
        return self._tried[name]

    def _ask_predicted(self, values: Values) -> list[Probe]:
        if (name := format_values(values)) not in self._probes:
            configs = self._make_configs(values)
            self._probes[name] = [ask_step(arm, configs[arm], self._longest[arm]) for arm in configs]
        return self._probes[name]

    def _measure(self, trial: Trial) -> Trial:
        """Return the trial with one measured step of the arm with the highest peak."""
        if trial.measured:
            return trial
        arm = trial.highest_peak[0]
        probe = self._ask_measured(trial.values, arm)
        try:
            answer = self._pool.answer(probe)
        except LaunchError as error:
            raise NotMeasured(arm, trial.values, error) from None
        if answer is None:
            raise MissingAnswer(trial.values, [probe])
        self._tried[format_values(trial.values)] = trial = replace(trial, measured={"arm": arm, **answer})
        return trial

    def _ask_measured(self, values: Values, arm: str) -> Probe:
        probe = next(probe for probe in self._ask_predicted(values) if probe.arm == arm)
        (length,), num_sequences = probe.job["lengths"], probe.job["num_sequences"]
        return ask_measured(
            arm, probe.config, length, num_sequences, self._device_bytes, gpus=self._gpus or ()
        )

    def _list_later_probes(self, missing: MissingAnswer) -> list[Probe]:
        """Return what the rule may ask for after the missing answers, in its order.

        A step is measured beside its own predictions. Once it is predicted to fit nothing else runs, because
        its measurement will most likely confirm it, and compiles on all cores.
        """
        if any(probe.kind == "measured" for probe in missing.probes):
            return []
        later = [
            probe
            for values in self._list_later_candidates(missing.values)
            for probe in self._ask_predicted(values)
        ]
        if self._gpus is None:
            return later
        # A guess: the arm with the highest peak so far
        arm = next((trial.highest_peak[0] for trial in self._tried.values()), missing.probes[0].arm)
        return [self._ask_measured(missing.values, arm), *later]

    def _list_later_candidates(self, missing: Values) -> list[Values]:
        later: list[Values] = []

        def fits(values: Values) -> bool:
            later.append(values)
            return False

        def is_predicted_to_fit(values: Values) -> bool:
            later.append(values)
            try:
                return self._predict(values).fits
            except (MissingAnswer, LaunchError):
                return True

        choose_candidate(self._groups, fits, is_predicted_to_fit)
        return later[later.index(missing) + 1 :] if missing in later else []


def _peaks_as_json(predictions: Iterable[PeakPrediction]) -> dict[str, dict[str, Any]]:
    return {
        prediction.arm: {
            "num_sequences": prediction.point.num_sequences,
            "length": prediction.point.length,
            "phase": prediction.highest_peak[0],
            "peak_bytes": prediction.highest_peak[1],
            "asleep_bytes": prediction.asleep_bytes,
        }
        for prediction in predictions
    }


def format_values(values: Values) -> str:
    """Format values as in a recipe, in the order of its open keys."""
    return ", ".join(value if isinstance(value, str) else json.dumps(value) for value in values.values())
