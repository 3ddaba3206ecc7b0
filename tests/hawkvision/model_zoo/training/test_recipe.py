"""Recipes: what is shipped, and how mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import ManifestError, NotFound
from hawkvision.model_zoo.training.recipe import (
    TrainingRecipe,
    load_recipe,
    recipe_labels,
)
from hawkvision.models.manifest import models_dir
from tests.hawkvision.model_zoo.synthetic_task import RECIPE

OURS = ("cifar10", "fashion_mnist")


def load(root: Path, text: str) -> TrainingRecipe:
    (root / "shapes").mkdir(exist_ok=True)
    (root / "shapes" / "recipe.toml").write_text(text)
    return load_recipe("shapes", root)


@pytest.mark.parametrize("task", OURS)
def test_shipped_recipes_have_a_tiny_a_small_and_a_large_stage_and_an_ensemble(task: str) -> None:
    recipe = load_recipe(task, models_dir())
    assert recipe.cascade.edge == ("tiny_w4", "tiny_w8", "tiny", "small")
    assert (recipe.cascade.default_edge, recipe.cascade.fpga) == ("small", "tiny_w4")
    assert recipe.cascade.dc == ("large", "committee")
    assert "large" in recipe.ensembles[0].members
    assert len(recipe_labels(recipe, models_dir())) == 10


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("seed = 1", "seed = 1\nmomentum = 0.9", "unknown field `momentum`"),
        ("epochs = 2", "epochs = 0", r"networks\[0\].epochs"),
        ('architecture = "convnet_tiny"', 'architecture = "resnet"', "tiny: no architecture 'resnet'; known are"),
        ('members = ["tiny", "other"]', 'members = ["tiny", "none"]', r"both: members \['none'\]"),
        ('dc = ["both"]', 'dc = ["all"]', r"cascade names \['all'\]"),
        ('default_edge = "tiny"', 'default_edge = "other"', "default_edge 'other' is not in cascade.edge"),
        ('name = "other"', 'name = "tiny"', "distinct names"),
        ('fpga = "tiny_w4"', 'fpga = "tiny"', "cascade.fpga 'tiny' is not among the quantised networks"),
        ('of = "tiny"', 'of = "both"', r"tiny_w4: of 'both' is not among the networks \['tiny', 'other'\]"),
        ("weight_bits = 4", "weight_bits = 1", r"quantised\[0\].weight_bits"),
        ('task = "shapes"', 'task = "forms"', "recipe of 'forms'"),
        ("format = 1", "format = ", "recipe.toml"),
    ],
)
def test_mistakes_name_the_file_and_the_place(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in RECIPE
    with pytest.raises(ManifestError, match=says) as caught:
        load(tmp_path, RECIPE.replace(old, new, 1))
    assert "recipe.toml" in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_is_a_recipe_or_an_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    with pytest.raises(ManifestError, match=r"recipe\.toml"):
        load(tmp_path_factory.mktemp("models"), text)


def test_unknown_task_and_network_list_the_known(tmp_path: Path) -> None:
    recipe = load(tmp_path, RECIPE)
    with pytest.raises(NotFound, match=r"no recipe for task 'dogs'.*shapes"):
        load_recipe("dogs", tmp_path)
    with pytest.raises(ManifestError, match=r"trains no 'huge'; it has \['tiny', 'other'\]"):
        recipe.network("huge")
    with pytest.raises(ManifestError, match=r"trains no \['huge'\]; it has \['tiny', 'other', 'tiny_w4'\]"):
        recipe.wanted(["tiny", "huge"])
    assert recipe.wanted([]) == {"tiny", "other", "tiny_w4"}
    assert recipe.wanted(["tiny_w4"]) == {"tiny_w4"}


@pytest.mark.parametrize("text", [None, "one\n", "one\ntwo\none\n"])
def test_labels_must_be_there_and_distinct(tmp_path: Path, text: str | None) -> None:
    recipe = load(tmp_path, RECIPE)
    if text is not None:
        (tmp_path / "shapes" / "labels.txt").write_text(text)
    with pytest.raises(ManifestError, match=r"labels\.txt"):
        recipe_labels(recipe, tmp_path)
