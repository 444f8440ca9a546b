"""Prints docs/faults.md: the library of faults, from abrun.recipe.faults.

python docs/faults.py > docs/faults.md
"""

from abrun.present.tables import Table, columns
from abrun.recipe.faults import FAULTS, Fault

COLUMNS = columns("name", "seam", "what it does", "size", "needs", "shows", "source")
HEAD = """# Faults, and what a comparison would have caught

Printed by `python docs/faults.py`, from `abrun/recipe/faults.toml`; a test compares the two.

A verdict of equivalence is only as good as the faults that the experiment could have detected. So abrun can
inject faults into the baseline: each fault below is a small change modelled on a real bug report, and none of
these bugs crashed anything.

```sh
abrun faults                                                   # this list; --json: for programs
abrun faults misgrouped                                        # one, with the settings that it needs
abrun sensitivity recipes/quickstart-faults.yaml               # inject every fault that the recipe can have
abrun sensitivity recipes/quickstart.yaml --faults late_half_batch:0.25,misgrouped --seeds 0-2
```

`abrun sensitivity` runs the recipe's baseline and, at the same seeds, the baseline with each fault, like
the arms of any experiment. Each fault is judged by the recipe's own claims and guards, as if it were the only
treatment, so there is no correction for the number of faults. For each fault, a line says what detected it
first (step one, a guard, a claim, or nothing), at which step, and with which figures.

For an undetected fault, the report states its size and the size of the experiment (pairs, steps, margins). If
the verdict is MATCH, such a fault would have passed, so a match in such an experiment does not exclude it. If
the verdict is INCONCLUSIVE, the fault would have prevented a match. The report also says what could detect
the fault: more pairs, more steps, a larger size, or a claim on a metric that it affects. The table is in
`report/sensitivity.md` of `<recipe>-sensitivity`, and in `sensitivity.json`.

Some faults need settings that no quickstart recipe has; add them with `--set`:

```sh
abrun sensitivity recipes/quickstart-faults.yaml --set cluster.cpu_ranks=2 \\
  --set algorithm.normalize_over=batch --faults rank_mean,whiten_per_rank,local_grad_norm
abrun sensitivity recipes/quickstart-faults.yaml --set algorithm.loss=gspo --faults gspo_padding
```

A recipe can run the same arms in addition to the treatment. The report shows their table next to the verdict;
they never affect the verdict:

```text
controls: {ulp_reruns: 2, faults: [flipped_advantages, {name: late_half_batch, size: 0.25}]}
```

`injected_fault: NAME`, or `{name: NAME, size: ...}`, injects a fault into any arm: trust a test
that you have seen fail. A fault whose needs a run does not meet (packing, several updates, PPO)
is refused in one line.

`controls.ulp_reruns` inject no fault. They are baselines with the same seed, in which each initial weight is
moved to a neighbouring number of `policy.dtype`, randomly up or down. If reruns are bit-identical, the ULP
reruns show how far a difference of one ULP grows, and a treatment's drift is compared with that.

A size says how large the fault is, in the fault's own unit. The table lists the default sizes.

## The library
"""


def page() -> str:
    """The whole of docs/faults.md."""
    lines = Table(COLUMNS, [*map(_row, FAULTS)]).to_markdown(str)
    general = ", ".join(f"`{fault.name}`" for fault in FAULTS if fault.any_algorithm)
    return "\n".join(
        [
            HEAD,
            *lines,
            f"\nSFT and DPO can have {general}; the other faults need a policy gradient (GRPO or PPO).",
        ]
    )


def _row(fault: Fault) -> tuple[str, ...]:
    size = "-" if fault.size is None else f"{fault.size:g} {fault.unit}"
    needs = ", ".join(fault.needs) or "-"
    return f"`{fault.name}`", fault.seam, fault.does, size, needs, fault.shows, fault.source


if __name__ == "__main__":
    print(page())
