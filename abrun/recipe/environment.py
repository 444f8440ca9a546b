"""Variables of the environment that a recipe sets for its runs."""

import re
from typing import Annotated

from pydantic import AfterValidator

from abrun.recipe.refusals import shortened
from abrun.recipe.section import FieldError

OURS = "ABRUN_"  # what the environment variables that abrun adds begin with
# Which rank a process is, and on what device, is the launcher's to say.
LAUNCHERS = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _checked(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise FieldError(f"got the name {shortened(name)}; allowed: letters, digits and '_'")
        if name.startswith(OURS) or name in LAUNCHERS:
            raise FieldError(
                f"got {name}, which the launcher sets itself; drop it (cluster: says how many GPUs)"
            )
    return env


Env = Annotated[dict[str, str], AfterValidator(_checked)]
