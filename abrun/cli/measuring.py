"""Command that measures or predicts memory. Slow imports happen inside it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import app, console, survive_output_errors
from abrun.cli.arguments import Overrides, RunsDir, parse_lengths, recipe_argument, refuse_options
from abrun.errors import LaunchError, RecipeError

if TYPE_CHECKING:
    from abrun.launch.memory.profile import SweepPlan

MeasuredRecipe = Annotated[Path, recipe_argument("Recipe: a YAML file or a built-in recipe.")]
Lengths = Annotated[str, typer.Option(help="Comma-separated sequence lengths in tokens.")]
Microbatches = Annotated[
    str | None,
    typer.Option(
        help="Micro-batch sizes per rank in sequences, such as 1,2,4; default: the recipe's, or 1 (dpo: 2)."
    ),
]
Sweeps = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=V1,V2",
        help="Sweep a recipe key over values, such as policy.dtype=float32,bfloat16; repeatable.",
    ),
]
MaxSeqLen = Annotated[
    bool, typer.Option("--max-seq-len", help="Also search for the longest sequence that fits, per arm.")
]
MaxSequences = Annotated[
    bool, typer.Option("--max-sequences", help="Also search for the largest micro-batch that fits, per arm.")
]
Budget = Annotated[float | None, typer.Option(min=0.001, max=100_000, help="Limit device memory to N GiB.")]
Sampling = Annotated[
    bool, typer.Option("--rollouts/--no-rollouts", help="Include one rollout phase as in the recipe.")
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Folder of peaks.json (with --predict: prediction.json); default: <runs-dir>/<recipe>-memory.",
    ),
]

Predict = Annotated[
    bool, typer.Option("--predict", help="Predict the peaks instead of measuring them; works on any machine.")
]
PredictedDevice = Annotated[
    str | None,
    typer.Option(help="With --predict: device memory, such as 80GiB or h200; default: this machine's GPUs."),
]
MASTER_DTYPES = ("float32", "bfloat16")
MasterDtype = Annotated[
    str | None,
    typer.Option(
        help="With --predict: dtype of weights, gradients and AdamW moments: float32 (abrun's trainer) or "
        "bfloat16 (trainers that load the model in bfloat16)."
    ),
]


@app.command("memory-profile")
@survive_output_errors
def memory_profile(
    recipe: MeasuredRecipe,
    overrides: Overrides = None,
    lengths: Lengths = "128,256,512,1024",
    sequences: Microbatches = None,
    sweep: Sweeps = None,
    max_seq_len: MaxSeqLen = False,
    max_sequences: MaxSequences = False,
    budget_gib: Budget = None,
    rollouts: Sampling = True,
    runs_dir: RunsDir = Path("runs"),
    output: Folder = None,
    predict: Predict = False,
    device_memory: PredictedDevice = None,
    master_dtype: MasterDtype = None,
) -> None:
    """Measure or predict peak memory by phase and arm.

    Measures training steps in separate processes, or predicts their peaks with --predict.

    Examples:
        abrun memory-profile fused-logprobs-memory --lengths 128,256
        abrun memory-profile fused-logprobs-memory --predict --device-memory 80GiB
    """
    from abrun.launch.memory.profile import MASTER_DTYPE, SweepPlan, expand_sweep

    if max_seq_len and max_sequences:
        raise RecipeError("--max-sequences cannot be combined with --max-seq-len; search for one at a time")
    if predict:
        measured = {"--max-seq-len": max_seq_len, "--max-sequences": max_sequences}
        measured |= {"--budget-gib": budget_gib, "--no-rollouts": not rollouts}
        refuse_options(
            measured,
            "{option} cannot be combined with --predict, which measures nothing; drop one of them (to set a "
            "device's memory: --device-memory)",
        )
    else:
        predicted = {"--device-memory": device_memory, "--master-dtype": master_dtype}
        refuse_options(predicted, needed="--predict")
    if master_dtype not in (None, *MASTER_DTYPES):
        raise RecipeError(f"--master-dtype: got {master_dtype!r}; allowed: {' or '.join(MASTER_DTYPES)}")
    variants = expand_sweep(recipe, overrides or [], sweep or [])
    name = variants[0].recipe.name
    folder = output or runs_dir / f"{name.removesuffix('-memory')}-memory"
    plan = SweepPlan(
        name=name,
        variants=variants,
        lengths=parse_lengths(lengths),
        sequences=parse_lengths(sequences, "--sequences", 1) if sequences else (),
        rollouts=rollouts,
        budget_bytes=None if budget_gib is None else int(budget_gib * 2**30),
        searched_size="length" if max_seq_len else "num_sequences" if max_sequences else None,
        master_dtype=master_dtype or MASTER_DTYPE,
    )
    if predict:
        _predict(plan, folder, device_memory)
    else:
        _measure(plan, folder)


def _measure(plan: "SweepPlan", folder: Path) -> None:
    from abrun.launch.memory.profile import measure_recipe
    from abrun.launch.memory.show import describe_files, make_tables

    profile = measure_recipe(plan, folder, console().say)
    for table in make_tables(profile):
        console().print(table)
    for line in filter(None, (profile.note, *describe_files(profile, folder))):
        console().say(line)


def _predict(plan: "SweepPlan", folder: Path, device: str | None) -> None:
    from abrun.recipe.implementations import load_tool

    predict = load_tool("predict", "--predict")
    prediction = predict.predict_recipe(plan, folder, device_bytes=predict.resolve_device_memory(device))
    console().print(predict.make_prediction_table(prediction))
    for line in (*prediction.notes(), f"prediction.json is in {folder}"):
        console().say(line)
    if missing := prediction.not_predicted:
        raise LaunchError("; ".join(f"arms.{arm}: not predicted: {why}" for arm, why in missing.items()))
