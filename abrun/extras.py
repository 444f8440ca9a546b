"""What only an extra of the package brings, and the line that says it is missing; nothing is imported."""

import importlib.util

EXTRAS = {  # as pyproject.toml names them, and a package of each that is looked for
    "train": ("torch", "transformers", "math_verify"),
    "figures": ("matplotlib",),
    "wandb": ("wandb",),
}


def lacking(extra: str) -> str | None:
    """`needs torch: pip install 'abrun[train]'`; None where the extra's packages are there."""
    missing = [package for package in EXTRAS[extra] if importlib.util.find_spec(package) is None]
    return f"needs {missing[0].replace('_', '-')}: pip install 'abrun[{extra}]'" if missing else None
