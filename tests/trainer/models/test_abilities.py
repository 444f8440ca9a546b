"""What a run can do with each family, as docs/reference/recipes.md says."""

import pytest

from tests.spawn import run_ranks
from tests.trainer.models.abilities import EXPECTED, abilities
from tests.trainer.models.families import FAMILIES, Family

SOME = [("llama", None), ("mistral", 4096), ("gemma3", None), ("deepseek_v3", None), ("mamba2", None)]
SOME_FAMILIES = tuple(
    family for family in FAMILIES if (family.kind, family.settings.get("sliding_window")) in SOME
)


@pytest.mark.megatron
@pytest.mark.parametrize(
    "families", [SOME_FAMILIES, pytest.param(FAMILIES, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_family_has_the_abilities_that_it_is_listed_with(families: tuple[Family, ...]) -> None:
    assert len(families) >= len(SOME)
    measured = run_ranks(abilities, 2, families, timeout_s=600)[0]
    wrong = [
        (family.kind, found)
        for family, found in zip(families, measured, strict=True)
        if found != EXPECTED[family.abilities]
    ]
    assert wrong == []
