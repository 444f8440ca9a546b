"""Prints docs/faults.md: the library of faults, from abrun.recipe.faults.

python docs/faults.py > docs/faults.md
"""

from abrun.present.tables import Table, columns
from abrun.recipe.faults import FAULTS, Fault

COLUMNS = columns("name", "seam", "what it does", "size", "needs", "shows", "source")
HEAD = """# Faults, and what a comparison would have caught

Printed by `python docs/faults.py`, from `abrun/recipe/faults.toml`; a test compares the two.

"Equivalent" is worth what the experiment could have found. So abrun can break the baseline on purpose, in
ways that have happened: each fault below is one small change after a real bug report, none of which crashed
anything.

```sh
abrun faults                                                   # this list; --json: for programs
abrun faults misgrouped                                        # one, with the settings that it needs
abrun sensitivity recipes/quickstart-faults.yaml               # inject all that the recipe can have
abrun sensitivity recipes/quickstart.yaml --faults late_half_batch:0.25,misgrouped --seeds 0-2
```

`abrun sensitivity` runs the recipe's baseline and, at the same seeds, the baseline with each fault: arms of
the ordinary launcher and store. Each is judged by the recipe's own claims and guards, as if it were the one
treatment, so that nothing is corrected for their number. A line says what makes the verdict MISMATCH, the
earliest of it: step one, a guard, a claim, or nothing, and at which step, with the figures.

What nothing catches is missed at two sizes, which the report names: that of the fault as it was injected, and
that of the experiment (pairs, steps, margins). If the verdict on it is MATCH, it would have passed, and a
match by such an experiment says nothing about such a fault; if it is INCONCLUSIVE, it would have prevented a
match. For each, the report says what could show it: more pairs, more steps, a larger size, or a claim where
it shows. The table is in `report/sensitivity.md` of `<recipe>-sensitivity`, and in `sensitivity.json`.

Some need what no quickstart has; `--set` gives it:

```sh
abrun sensitivity recipes/quickstart-faults.yaml --set cluster.cpu_ranks=2 \\
  --set algorithm.normalize_over=batch --faults rank_mean,whiten_per_rank,local_grad_norm
abrun sensitivity recipes/quickstart-faults.yaml --set algorithm.loss=gspo --faults gspo_padding
```

In a recipe the same arms run beside the treatment, and the report shows the table beside the verdict, which
they are never part of:

```text
controls: {ulp_reruns: 2, faults: [flipped_advantages, {name: late_half_batch, size: 0.25}]}
```

`injected_fault: NAME`, or `{name: NAME, size: ...}`, injects one in any arm: trust a test that you have seen
fail. A fault that a run cannot have (it needs packing, several updates, PPO) is refused in one line.

`controls.ulp_reruns` are no fault: baselines with the same seed, each initial weight of which is moved to a
neighbouring number of `policy.dtype`, up or down by chance. Where reruns repeat bit for bit they say what
one ULP grows into, and a treatment's drift is held against that.

A size is how much of the fault there is, in its own unit; the one below is that of a fault without a size.

## The library
"""


def page() -> str:
    """The whole of docs/faults.md."""
    lines = Table(COLUMNS, [*map(_row, FAULTS)]).to_markdown(str)
    general = ", ".join(f"`{fault.name}`" for fault in FAULTS if fault.any_algorithm)
    return "\n".join([HEAD, *lines, f"\nSFT and DPO can have {general}; the others are a policy gradient's."])


def _row(fault: Fault) -> tuple[str, ...]:
    size = "-" if fault.size is None else f"{fault.size:g} {fault.unit}"
    needs = ", ".join(fault.needs) or "-"
    return f"`{fault.name}`", fault.seam, fault.does, size, needs, fault.shows, fault.source


if __name__ == "__main__":
    print(page())
