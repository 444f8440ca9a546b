"""Functions that `abrun launch` and `abrun memory-profile` call."""

from rich.text import Text

from abrun.launch.memory.profile import GIB, choose_unit, format_bytes
from abrun.report.present.tables import Table, columns
from abrun.tools.predict.auto import resolve_auto
from abrun.tools.predict.peaks import (
    SweepPrediction,
    describe_predicted_memory,
    predict_recipe,
    resolve_device_memory,
)

__all__ = [
    "describe_predicted_memory",
    "make_prediction_table",
    "predict_recipe",
    "resolve_auto",
    "resolve_device_memory",
]


# Table of predicted peaks, for the terminal.

MIN_SHARE = 0.01  # kinds of memory below this share of the highest peak are not shown


def make_prediction_table(prediction: SweepPrediction) -> Table:
    """Return the table of predicted peaks: a row per point and arm, then a row per phase with its kinds."""
    highest_bytes = max(peak.highest_peak[1] for peak in prediction.peaks)
    largest: dict[str, int] = {}  # bytes of each kind
    for bytes_by_kind in (kinds for peak in prediction.peaks for kinds in peak.by_phase.values()):
        largest |= {kind: max(size, largest.get(kind, 0)) for kind, size in bytes_by_kind.items()}
    kinds = [kind for kind, size in largest.items() if size > MIN_SHARE * highest_bytes]
    unit, device_text = choose_unit([highest_bytes]), ""
    if prediction.device_bytes is not None:
        device_text = f" of {prediction.device_bytes / GIB:.1f} GiB device memory"
    title = f"{prediction.name}: predicted peak_allocated_bytes, {unit[0]}{device_text}"
    numeric_headings = ["peak", "fits"] if device_text else ["peak"]
    empty_cells, rows = [""] * len(numeric_headings[1:]), []
    for arm_prediction in prediction.peaks:
        point = arm_prediction.point
        swept = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point.swept)
        size = f"{point.num_sequences} x {point.length:,} tokens, {arm_prediction.arm}"
        fits = [prediction.fits(arm_prediction)] if device_text else []
        summary_row = (size, format_bytes(arm_prediction.highest_peak[1], unit), *fits, swept)
        rows.append([Text(cell, style="bold") for cell in summary_row])
        for phase, bytes_by_kind in arm_prediction.by_phase.items():
            amounts = ((kind, format_bytes(bytes_by_kind.get(kind, 0), unit)) for kind in kinds)
            breakdown = ", ".join(f"{kind} {amount}" for kind, amount in amounts if amount != "0.0")
            rows.append(
                [f"  {phase}", format_bytes(sum(bytes_by_kind.values()), unit), *empty_cells, breakdown]
            )
        if arm_prediction.engine_bytes is not None:
            rows.append(["  vllm, while sampling", format_bytes(arm_prediction.engine_bytes, unit)])
    table_columns = columns(
        "", *numeric_headings, "breakdown", numeric=numeric_headings, no_wrap=("", *numeric_headings)
    )
    return Table(table_columns, rows, f"{title}; states in {prediction.master_dtype}")
