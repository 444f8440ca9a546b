"""The command `abrun audit`. Slow imports happen inside it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import console, make_group, print_json, survive_output_errors
from abrun.cli.arguments import Json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from abrun.tools.audit.audit import Audit

DIFFERS = 3  # exit code, as of MISMATCH

commands = make_group()


@commands.command(rich_help_panel="Diagnostics")
@survive_output_errors
def audit(
    dump: Annotated[Path, typer.Argument(help="Dump of one micro-batch, by a framework's own loss.")],
    algorithm: Annotated[
        str | None,
        typer.Option("--as", metavar="ALGORITHM", help="Check against this algorithm, not the dump's."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Recompute a step of any framework; name its first error.

    A dump has the tensors that a loss read and wrote, and its settings. Bounds follow from their types.

    Exit code: 0 if all agree, 3 if a quantity differs.

    Examples:
        abrun audit step.safetensors
        abrun audit step.safetensors --as dr_grpo
    """
    from abrun.tools.audit.audit import audit as audit_dump
    from abrun.tools.audit.reading import read_dump

    loaded = read_dump(dump, algorithm)
    result = audit_dump(loaded)
    if as_json:
        print_json({"algorithm": loaded.algorithm, "agrees": result.first is None} | asdict(result))
    else:
        console().print(summary(result))
    raise typer.Exit(DIFFERS if result.first else 0)


def summary(result: "Audit") -> "RenderableType":
    """Return the checks as a table, the first difference and what was not checked."""
    from rich.console import Group
    from rich.text import Text

    from abrun.report.present.tables import Table, columns

    rows = []
    for check in result.checks:
        mark = "agrees" if check.agrees else "differs"
        mark += f" at {check.num_different} places" if check.place and not check.agrees else ""
        numbers = f"{check.recorded:.7g}", f"{check.recomputed:.7g}", f"{check.bound:.1g}"
        rows.append((check.name + (str([*check.place]) if check.place else ""), *numbers, mark))
    titles = ("quantity", "in the dump", "recomputed", "bound", "")
    lines = [f"{len(result.checks)} quantities agree within the rounding of their types"]
    if result.first is not None:
        witness = "" if result.seen_in == result.first else f", seen in {result.seen_in}"
        fits = result.fits or ("no known variant fits; the quantities above it agree",)
        lines = [f"first difference: {result.first}{witness}", *(f"- {says}" for says in fits)]
    lines += [f"not checked: {name}: {why}" for name, why in result.not_checked.items()]
    lines += [f"not in the dump: {', '.join(result.absent)}"] if result.absent else []
    table = Table(columns(*titles, numeric=titles[1:4]), rows)
    return Group(table.to_rich(pad_edge=True), Text("\n".join(lines)))
