"""Recipes: what ships, what is refused and how the refusal helps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fut_convert.errors import RecipeError
from fut_convert.recipe import Recipe, load_recipe, recipe_keys, recipe_names, uses_int4
from repository import REPOSITORY

SHIPPED = ["demo", "gptq", "llama-3.1-70b", "llama-3.1-8b-paper", "llama-3.2-1b", "llama-3.2-3b", "rtn"]


def write(path: Path, contents: Any) -> str:
    path.write_text(contents if isinstance(contents, str) else yaml.safe_dump(contents), encoding="utf-8")
    return str(path)


def test_recipes_that_ship_are_found_by_name() -> None:
    assert recipe_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_valid_and_resolved(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.int4.scale_method != "auto"
    assert len(recipe.description) > 10


def test_the_papers_recipe_is_the_papers() -> None:
    recipe = load_recipe("llama-3.1-8b-paper")
    assert (recipe.int4.method, recipe.int4.scale_method, recipe.int4.group_size) == ("rtn", "absmax_7", 128)
    assert recipe.kv_cache.rotation and recipe.kv_cache.bits == 4


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_works_without_calibration(name: str) -> None:
    recipe = load_recipe(name, {"calibration.enabled": False, "int4.method": "rtn"})
    assert recipe.int4.scale_method in ("search", "absmax_7")


def test_a_recipe_object_is_checked_and_resolved_like_a_file() -> None:
    recipe = load_recipe(Recipe(name="own", head="e4m3"), {"int4.group_size": 32})
    assert (recipe.name, recipe.head, recipe.int4.group_size) == ("own", "e4m3", 32)
    assert recipe.int4.scale_method == "weighted_search"
    with pytest.raises(RecipeError, match="recipe own: head is 'fp8'"):
        load_recipe(Recipe(name="own", head="fp8"))


def test_a_file_may_name_itself(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path / "mine.yaml", {"name": "ours"})).name == "ours"


def test_a_file_may_leave_everything_out(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path / "mine.yaml", ""))
    assert recipe == Recipe(name="mine", int4=recipe.int4)
    assert recipe.int4.scale_method == "weighted_search"


def test_overrides_replace_keys_and_none_leaves_them() -> None:
    recipe = load_recipe("rtn", {"int4.group_size": 32, "head": "e4m3", "weights": ["int4"], "int4.gain": None})
    assert (recipe.int4.group_size, recipe.head, recipe.weights, recipe.int4.gain) == (32, "e4m3", ("int4",), "runtime")


def test_without_calibration_the_search_is_unweighted() -> None:
    assert load_recipe("rtn", {"calibration.enabled": False}).int4.scale_method == "search"


def test_weighted_scales_without_calibration_contradict_each_other(tmp_path: Path) -> None:
    text = {"int4": {"scale_method": "weighted_search"}, "calibration": {"enabled": False}}
    with pytest.raises(RecipeError, match=r"mine\.yaml.*weighted_search.*--scale-method search"):
        load_recipe(write(tmp_path / "mine.yaml", text))
    assert not uses_int4(load_recipe(write(tmp_path / "mine.yaml", {**text, "weights": ["e4m3"]})))


def test_formats_are_stored_in_one_order() -> None:
    assert load_recipe("rtn", {"weights": ["bf16", "int4", "e4m3"]}).weights == ("e4m3", "int4", "bf16")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"weigths": ["int4"]}, "unknown key 'weigths'; did you mean 'weights'"),
        ({"int4": {"groupsize": 64}}, "unknown key 'int4.groupsize'; did you mean 'int4.group_size'"),
        ({"int4": {"scale_method": "weighted_serch"}}, r"did you mean weighted_search\?"),
        ({"int4": 4}, "int4 is 4, expected keys and values"),
        ({"int4": {"group_size": 48}}, "int4.group_size is 48, expected one of auto, 32, 64, 128"),
        ({"int4": {"group_size": "64"}}, "int4.group_size is '64'"),
        ({"weights": []}, "weights is .*, expected a list of"),
        ({"weights": ["int4", "int4"]}, "each at most once"),
        ({"weights": "int4"}, "weights is 'int4', expected a list of"),
        ({"kv_cache": {"bits": 8}}, "kv_cache.bits is 8, expected one of 4, 16"),
        ({"kv_cache": {"rotation": 1}}, "kv_cache.rotation is 1, expected true or false"),
        ({"calibration": {"windows": 0}}, "calibration.windows is 0, expected a whole number of at least 1"),
        ({"calibration": {"windows": True}}, "calibration.windows is True"),
        ({"calibration": {"windows": 2.5}}, "calibration.windows is 2.5"),
        ({"activation": {"margin": 0.5}}, "activation.margin is 0.5, expected a number of at least 1"),
        ({"activation": {"margin": 1e30}}, "expected a number of at least 1 and at most 1e.06"),
        ({"max_shard_gb": 1e300}, "expected a number of at least 0.001 and at most 1e.06"),
        ({"activation": {"margin": float("inf")}}, "activation.margin is inf"),
        ({"activation": {"margin": float("nan")}}, "activation.margin is nan"),
        ({"head": "fp8"}, "head is 'fp8', expected one of e4m3, int4, bf16"),
        (["weights"], "expected keys and values"),
        ("weights: [int4", "not a readable YAML file"),
        ("description: &a [x]\nname: *a", r"aliases \(\*name\) are not taken"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "aliases"),
        ("description: 2024-99-99", "not a readable YAML file: month must be in 1..12"),
        ("description: !!timestamp x", "not a readable YAML file"),
        ("description: !!int x", "not a readable YAML file"),
        ("description: !!bool x", "not a readable YAML file"),
        ("description: !!map [1]", "expected keys and values"),
        ("description: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("[" * 5000, "nested too deeply"),
        ("int4: {group_size: 0x" + "f" * 9000 + "}", "int4.group_size is a number of thousands of digits"),
        ({"int4": {"group_size": "x" * 1000}}, "int4.group_size is 'x+…, expected one of"),
        ({"x" * 1000: 1}, "unknown key 'x+…"),
        ('description: "\\ud800"', "description is .*ud800', expected a text"),
        ('{"\\ud800": 1, "\\ud800": 2}', r"the key '.ud800' stands twice"),
        ("#" * 200_000, "has 200000 bytes; a recipe has at most 100000"),
        ("head: int4\nint4: {gain: folded, gain: runtime}", "the key gain stands twice(.|\n)*line 2"),
        ("head: int4\nhead: bf16", "the key head stands twice"),
        ("3: int4", "unknown key '3'"),
        ({"description": 3}, "description is 3, expected a text"),
        ({"calibration": {"text": ""}}, "calibration.text is '', expected a text"),
        ({"max_shard_gb": 0}, "max_shard_gb is 0, expected a number of at least 0.001"),
        ("head: !!python/object/apply:os.getcwd []", "not a readable YAML file"),
    ],
)
def test_mistakes_are_named_with_their_file_and_place(tmp_path: Path, contents: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(write(tmp_path / "mine.yaml", contents))
    assert "mine.yaml" in str(caught.value)


def test_unknown_overrides_and_recipes_name_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"did you mean 'int4\.gain'"):
        load_recipe("rtn", {"int4.gian": "folded"})
    with pytest.raises(RecipeError, match="did you mean 'demo'"):
        load_recipe("demoo")


def test_a_resolved_recipe_holds_no_path_and_reads_back(tmp_path: Path) -> None:
    recipe = load_recipe("rtn", {"calibration.text": "/home/someone/texts/mine.txt", "int4.group_size": 64})
    data = recipe.to_dict()
    assert data["calibration"]["text"] == "mine.txt"
    again = load_recipe(write(tmp_path / "rtn.yaml", data))
    assert again.to_dict() == data


def test_every_key_is_documented_with_its_default() -> None:
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", page, flags=re.M))
    for key in recipe_keys():
        assert key in documented, f"docs/recipes.md does not describe {key}"
        value: Any = Recipe()
        for part in key.split("."):
            value = getattr(value, part)
        if key not in ("name", "description"):
            shown = yaml.safe_load(documented[key].strip("`"))
            assert (tuple(shown) if isinstance(shown, list) else shown) == value, key
