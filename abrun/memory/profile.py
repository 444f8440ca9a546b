"""memory-profile: peak memory by phase and arm over a sweep of lengths, on this machine's device.

Each arm is measured by its own torchrun process group, one after the other, so that each has the device to
itself.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from abrun import store
from abrun.errors import LaunchError
from abrun.launch.probe import probe
from abrun.metric_names import is_peak_memory
from abrun.recipe import BASELINE, Declared, Dpo, OwnRunConfig, not_built


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """One arm at one length: peak bytes by phase, the largest of any rank.

    Where memory ran out, `out_of_memory` is the phase in which it did, and the peaks are how far it came.
    """

    arm: str
    length: int
    by_phase: dict[str, int]
    out_of_memory: str | None = None

    @property
    def highest(self) -> tuple[str, int] | None:
        """The phase with the highest peak, and the peak, of a step that fits."""
        fits = self.out_of_memory is None and self.by_phase
        return max(self.by_phase.items(), key=lambda item: item[1]) if fits else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """The measured sweep."""

    name: str
    num_sequences: int
    kind: str  # peak_allocated_bytes (CUDA) or peak_live_tensor_bytes (CPU)
    peaks: list[Peaks]  # by length, then by arm, the baseline first

    def ratio(self, peaks: Peaks) -> float | None:
        """The arm's highest peak over the baseline's at the same length."""
        bases = (p.highest for p in self.peaks if p.arm == BASELINE and p.length == peaks.length)
        base = next(bases, None)  # the baseline's sweep may have ended at a shorter length, out of memory
        return peaks.highest[1] / base[1] if base and peaks.highest else None

    @property
    def unit(self) -> tuple[str, int]:
        """MiB, or GiB where the peaks are large, and its bytes."""
        largest = max((value for peaks in self.peaks for value in peaks.by_phase.values()), default=0)
        return ("GiB", 2**30) if largest >= 4 * 2**30 else ("MiB", 2**20)

    def table(self) -> Table:
        """Peaks by phase, where the highest is, and its ratio to the baseline's."""
        phases = list(dict.fromkeys(phase for peaks in self.peaks for phase in peaks.by_phase))
        unit, num_bytes = self.unit
        title = f"{self.name}: {self.kind} in {unit}, {self.num_sequences} sequence(s) a rank and microbatch"
        table = Table(title=title, title_justify="left")
        for heading in ("length", "arm", *phases, "highest in", "ratio"):
            table.add_column(heading, justify="left" if heading in ("arm", "highest in") else "right")
        for before, peaks in zip([None, *self.peaks], self.peaks, strict=False):
            if before and before.length != peaks.length:
                table.add_section()
            highest, ratio = peaks.highest, self.ratio(peaks)
            values = [peaks.by_phase.get(phase) for phase in phases]
            table.add_row(
                f"{peaks.length:,}",
                peaks.arm,
                *("-" if value is None else f"{value / num_bytes:,.1f}" for value in values),
                highest[0] if highest else f"out of memory in {peaks.out_of_memory}",
                f"{ratio:.3f}" if ratio else "-",
            )
        return table


def measure_recipe(
    recipe: Declared, output: Path, *, lengths: Sequence[int], num_sequences: int | None = None
) -> MemoryProfile:
    """Measure every arm of `recipe` and write peaks.json, memory.png and memory.svg into `output`.

    `lengths`, ascending, are tokens of a sequence (prompt and completion); `num_sequences` a rank's
    microbatch, by default the baseline's `policy.micro_batch_size`, or 1 (2 where an arm has pairs). Raises
    LaunchError where an arm cannot be measured here.
    """
    measured: dict[str, list[Peaks]] = {}
    kind = ""
    configs = _own_configs(recipe)
    num_sequences = _num_sequences(configs, num_sequences)
    for arm, config in configs.items():
        job = {"lengths": list(lengths), "num_sequences": num_sequences}
        rows = probe("abrun.memory.measure", output / "arms" / arm, config, job)
        kind = next((key.rsplit("/", 1)[1] for row in rows for key in row if is_peak_memory(key)), kind)
        measured[arm] = [_peaks(arm, row) for row in rows]
    profile = MemoryProfile(
        name=recipe.name,
        num_sequences=num_sequences,
        kind=kind,
        peaks=[p for length in lengths for arm in measured for p in measured[arm] if p.length == length],
    )
    store.write_json(
        output / "peaks.json",
        {
            "schema_version": store.SCHEMA_VERSION,
            "recipe": recipe.name,
            "kind": kind,
            "num_sequences": num_sequences,
            "peaks": [asdict(peaks) for peaks in profile.peaks],
        },
    )
    plot(profile, output)
    return profile


def plot(profile: MemoryProfile, output: Path) -> None:
    """Highest peak against length, a line an arm, as memory.png and memory.svg."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "abrun"
    from matplotlib import pyplot

    unit, num_bytes = profile.unit
    figure, ax = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    arms = list(dict.fromkeys(p.arm for p in profile.peaks))
    for arm, colour in zip(
        arms, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00") * 9, strict=False
    ):
        points = [(p.length, p.highest[1] / num_bytes) for p in profile.peaks if p.arm == arm and p.highest]
        if points:
            ax.plot(*zip(*points, strict=True), marker="o", color=colour, label=arm)
    ax.set_xscale("log", base=2)
    ax.set_xticks([p.length for p in profile.peaks], [f"{p.length:,}" for p in profile.peaks])
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"sequence length, tokens ({profile.num_sequences} sequence(s) a rank and microbatch)")
    ax.set_ylabel(f"highest {profile.kind.removesuffix('_bytes').replace('_', ' ')}, {unit}")
    ax.set_title(f"{profile.name}: peak memory of a training step", loc="left")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    with store.explained(output):
        figure.savefig(output / "memory.png", dpi=150)
        figure.savefig(output / "memory.svg", metadata={"Date": None})
    pyplot.close(figure)


def _own_configs(recipe: Declared) -> dict[str, OwnRunConfig]:
    """The arms' configurations, the baseline's first."""
    configs: dict[str, OwnRunConfig] = {}
    for arm in sorted(recipe.arms, key=lambda arm: arm != BASELINE):
        config = recipe.run_config(arm)
        if not isinstance(config, OwnRunConfig):
            raise LaunchError(
                f"{recipe.name}: arms.{arm}: trainer.type: got 'command'; memory-profile runs single steps "
                "of abrun's own trainer alone: measure a foreign one with its own tools"
            )
        for line in not_built(config):
            raise LaunchError(f"{recipe.name}: arms.{arm}: {line}")
        configs[arm] = config
    return configs


def _num_sequences(configs: dict[str, OwnRunConfig], asked: int | None) -> int:
    together = 2 if any(isinstance(config.algorithm, Dpo) for config in configs.values()) else 1
    num_sequences = asked or configs[BASELINE].policy.micro_batch_size or together
    if num_sequences % together:
        raise LaunchError(
            f"--sequences: got {num_sequences} with algorithm.type 'dpo', whose pairs stay together; use an "
            "even number"
        )
    return num_sequences


def _peaks(arm: str, row: dict[str, Any]) -> Peaks:
    allocated = {
        key: value for key, value in row.items() if key.endswith(("allocated_bytes", "tensor_bytes"))
    }
    by_phase = {key.split("/")[1]: int(value) for key, value in allocated.items()}
    return Peaks(
        arm=arm, length=int(row["length"]), by_phase=by_phase, out_of_memory=row.get("out_of_memory")
    )
