"""Random streams of a run, derived from its seed by name so that all arms draw the same numbers."""

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Return the seed of the stream called `names`, independent of the seed's other streams."""
    digest = hashlib.sha256("/".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:7], "big")
