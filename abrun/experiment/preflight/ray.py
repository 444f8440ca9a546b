"""Whether this environment can ask a Ray cluster."""

import importlib.util

from abrun.reasons import Code, Reason


def ray_refusal() -> Reason | None:
    """Return why this environment cannot ask Ray; None where it can."""
    if importlib.util.find_spec("ray") is None:
        return Code.SETTING_NEEDS_PACKAGE(
            field="launcher.type", got="ray", package="ray", install="pip install 'abrun[ray]'", instead=None
        )
    return None
