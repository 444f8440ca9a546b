"""The schema for editors: it takes every recipe that ships, and finds what a typing error would be."""

import copy
from typing import Any

import jsonschema
import pytest
import yaml

from abrun.experiment.starter.schema import recipe_schema
from abrun.experiment.starter.shipped import recipe_files
from abrun.recipe.reading import Loader


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(recipe_schema())


def problems(schema: jsonschema.Draft7Validator, tree: Any) -> list[str]:
    return [f"{'.'.join(map(str, one.path))}: {one.message}" for one in schema.iter_errors(tree)]


def test_it_takes_every_recipe_that_ships(schema: jsonschema.Draft7Validator) -> None:
    trees = {path: yaml.load(path.read_text(), Loader) for path in recipe_files().values()}
    assert len(trees) > 30 and {path: problems(schema, tree) for path, tree in trees.items()} == {
        path: [] for path in trees
    }


@pytest.mark.parametrize(
    ("key", "value", "place", "word"),
    [
        ("stepz", 3, "", "'stepz' was unexpected"),
        ("rollout", {"temprature": 1.0}, "rollout", "'temprature' was unexpected"),
        ("steps", "many", "steps", "'integer'"),
        ("policy", {"logprobs": {"impl": "fast"}}, "policy.logprobs.impl", "'fast' is not"),
    ],
)
def test_it_finds_a_typing_error(
    schema: jsonschema.Draft7Validator, key: str, value: Any, place: str, word: str
) -> None:
    tree = yaml.load(recipe_files()["quickstart"].read_text(), Loader)
    assert any(one.startswith(f"{place}: ") and word in one for one in problems(schema, {**tree, key: value}))


def test_a_trainer_of_another_kind_has_another_recipe(schema: jsonschema.Draft7Validator) -> None:
    tree = yaml.load(recipe_files()["trl"].read_text(), Loader)
    wrong = copy.deepcopy(tree) | {"rollout": {}}
    wrong["trainer"]["argz"] = []
    assert len(problems(schema, wrong)) == 2 and "'rollout'" in problems(schema, wrong)[0]


def test_an_editor_shows_what_stands_beside_a_field() -> None:
    fields = recipe_schema()["$defs"]["Recipe"]["properties"]
    assert fields["arms"]["description"].startswith("arm -> its differences")
    assert "inherit" in fields["defaults"]["description"]
