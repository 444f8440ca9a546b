"""The command `abrun audit`. Slow imports happen inside it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import console, make_group, print_json, survive_output_errors
from abrun.cli.arguments import Json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from abrun.tools.audit.audit import Audit, Check

DIFFERS = 3  # exit code, as of MISMATCH

commands = make_group()


@commands.command(rich_help_panel="Diagnostics")
@survive_output_errors
def audit(
    dump: Annotated[Path, typer.Argument(help="A dump of one micro-batch: docs/reference/audit-dump.md.")],
    algorithm: Annotated[
        str | None,
        typer.Option("--as", metavar="ALGORITHM", help="Check against this algorithm, not the dump's own."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Recompute one training step of any framework and name the first wrong quantity.

    The dump has the tensors that the framework's loss read and wrote, and its settings. Bounds follow from the
    tensors' types.

    Exit code: 0 if all agree, 3 if a quantity differs.

    Examples:
        abrun audit step.safetensors
        abrun audit step.safetensors --as dr_grpo
    """
    from abrun.errors import StoreError
    from abrun.tools.audit.audit import audit as audit_dump
    from abrun.tools.audit.reading import read_dump
    from abrun.tools.audit.settings import ALGORITHMS

    if algorithm is not None and algorithm not in ALGORITHMS:
        raise StoreError(f"--as: got {algorithm!r}; allowed: {', '.join(ALGORITHMS)}")
    loaded = read_dump(dump, algorithm)
    result = audit_dump(loaded)
    if as_json:
        print_json({"algorithm": loaded.algorithm, **result.as_json()})
    else:
        console().print(summary(result))
    raise typer.Exit(DIFFERS if result.first else 0)


def summary(result: "Audit") -> "RenderableType":
    """Return the checks as a table, the first difference and what was not checked."""
    from rich.console import Group
    from rich.text import Text

    from abrun.report.present.tables import Table, columns

    titles = ("quantity", "in the dump", "recomputed", "bound")
    table = Table(columns(*titles, "", numeric=titles[1:]), [_row(check, result) for check in result.checks])
    lines = []
    if result.first is None:
        lines.append(f"{len(result.checks)} quantities agree within the rounding of their types")
    else:
        seen = "" if result.seen_in == result.first else f" (seen in {result.seen_in})"
        lines.append(f"first difference: {result.first}{seen}")
        lines += [f"  {'or ' * bool(index)}{says}" for index, says in enumerate(result.fits)]
        if not result.fits:
            lines.append("  no known variant fits; what stands above it agrees")
    lines += [f"not checked: {name}: {why}" for name, why in result.not_checked.items()]
    return Group(table.to_rich(pad_edge=True), Text("\n".join(lines)))


def _row(check: "Check", result: "Audit") -> tuple[str, ...]:
    mark = "agrees"
    if not check.agrees:
        mark = "<- first" if check.name == result.seen_in else "differs"
        if check.place:
            mark += f" at {check.num_different} places, most at {list(check.place)}"
    return (
        check.name,
        *(f"{value:.7g}" for value in (check.recorded, check.recomputed)),
        f"{check.bound:.1g}",
        mark,
    )
