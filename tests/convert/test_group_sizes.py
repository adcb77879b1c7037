"""Group sizes of single modules: from the recipe to the plan, the artifact and both backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fut_convert import convert, plan_conversion
from fut_convert.errors import PreflightError, RecipeError
from fut_convert.group_sizes import idle_overrides, overridden_size
from fut_convert.recipe import load_recipe
from fut_convert.terminal import print_plan
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import MODULES
from fut_runtime.commands.info import _artifact_facts, _format_text
from fut_runtime.cuda.tensors import DeviceTensors
from fut_runtime.reference import backend as reference

Make = Callable[..., Path]
KEY = "int4.group_size_overrides"
QUICK = {"calibration.windows": 2, "calibration.window_tokens": 128, "calibration.allow_few_tokens": True}
MIXED = {**QUICK, "int4.group_size": 128, KEY: {"down": 64, "layers.0.*": 32, "layers.*.o": 64}}
EXPECTED = {
    "layers.0.qkv": 32, "layers.0.o": 32, "layers.0.gate_up": 32, "layers.0.down": 32,
    "layers.1.qkv": 128, "layers.1.o": 64, "layers.1.gate_up": 128, "layers.1.down": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("down", {"layers.0.down", "layers.12.down"}),
        ("head", {"head"}),
        ("layers.12.*", {"layers.12.down", "layers.12.qkv"}),
        ("layers.*.qkv", {"layers.12.qkv"}),
        ("layers.0.down", {"layers.0.down"}),
        ("layers.*.*", {"layers.0.down", "layers.12.down", "layers.12.qkv"}),
        ("layers.1.*", set()),
    ],
)
def test_a_key_names_modules(key: str, named: set[str]) -> None:
    names = ["layers.0.down", "layers.12.down", "layers.12.qkv", "head"]
    assert {name for name in names if overridden_size({key: 32}, name)} == named
    assert idle_overrides({key: 32}, names) == ([] if named else [key])


@pytest.mark.parametrize(
    "value",
    [
        ["down"], {"dwn": 32}, {"down": 48}, {"down": "32"}, {"down": True}, {3: 32}, {"layers.0": 32},
        {"layers.01.down": 32}, {"layers.x.down": 32}, {"layers.0.head": 32}, {"*": 32}, {"down": None},
    ],
)  # fmt: skip
def test_what_is_no_name_or_size_is_refused(value: Any) -> None:
    with pytest.raises(RecipeError, match=r"int4\.group_size_overrides is .*, expected names and group sizes"):
        load_recipe("rtn", {KEY: value})


def test_a_recipe_file_may_give_them_in_any_order(tmp_path: Path) -> None:
    for i, text in enumerate(("{down: 64, layers.0.*: 32}", "{layers.0.*: 32, down: 64}")):
        (tmp_path / f"{i}.yaml").write_text(f"name: mixed\nint4: {{group_size_overrides: {text}}}\n")
    recipes = [load_recipe(str(tmp_path / f"{i}.yaml")) for i in range(2)]
    assert recipes[0] == recipes[1] == load_recipe(recipes[0])
    assert list(recipes[0].int4.group_size_overrides) == ["down", "layers.0.*"]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_each_module_is_stored_and_run_in_its_groups(method: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = str(tiny_checkpoint())
    mixed = convert(checkpoint, tmp_path / "mixed", overrides={**MIXED, "int4.method": method})
    plain = convert(checkpoint, tmp_path / "plain", overrides={**MIXED, KEY: {}, "int4.method": method})
    artifact = Artifact.open(mixed.path, verify=True)
    assert {n: f["int4"].group_size for n, f in artifact.manifest.weights.items() if "int4" in f} == EXPECTED
    assert artifact.manifest.recipe["int4"]["group_size_overrides"] == MIXED[KEY]
    for name, size in EXPECTED.items():
        columns = artifact.manifest.weights[name]["int4"].padded_shape[1]
        assert artifact.tensor(f"{name}.int4_scale").shape[1] == columns // size
    first = "layers.0.qkv.int4"
    assert mixed.module_error[first] < 0.95 * plain.module_error[first]

    sizes = [
        getattr(layer, m).group_size for layer in DeviceTensors(artifact.manifest, "int4", {}).layers() for m in MODULES
    ]
    assert sizes == list(EXPECTED.values())
    logits = []
    own = convert(checkpoint, tmp_path / "bf16", overrides={**QUICK, "weights": ["bf16"]})
    for mode, path in (("bf16", own.path), ("int4", mixed.path)):
        backend = reference.load(
            Artifact.open(path), decode_mode=mode, prefill_mode="decode", kv_cache="bf16", compute="fp32"
        )
        logits.append(backend.prefill([(backend.open_request(64), list(range(3, 40)))]))
    # Scales taken for those of other groups would leave nothing of the logits.
    assert 0 < (logits[1] - logits[0]).norm() < 0.4 * logits[0].norm()


def test_the_plan_shows_each_size_with_its_layers(
    tiny_checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_conversion(str(tiny_checkpoint()), tmp_path / "out", overrides=MIXED)
    rows = [(row.module, row.layers, row.group_size) for row in plan.rows if row.format == "int4"]
    assert rows == [
        ("qkv", 1, 32), ("qkv", 1, 128), ("o", 1, 32), ("o", 1, 64),
        ("gate_up", 1, 32), ("gate_up", 1, 128), ("down", 1, 32), ("down", 1, 64),
    ]  # fmt: skip
    assert {row.layers for row in plan.rows if row.format == "e4m3"} == {2}
    print_plan(plan, tmp_path / "out")
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert sum(line.startswith("gate_up ×1 ") for line in lines) == 2 and "×2" not in shown
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({KEY: {"layers.2.down": 32}}, "layers.2.down"),
        ({KEY: {"head": 32}}, "head"),
        ({KEY: {"down": 32}, "weights": ["e4m3"], "head": "int4"}, "down"),
    ],
)
def test_a_key_that_names_nothing_is_refused_in_the_plan(
    options: dict[str, Any], key: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    with pytest.raises(PreflightError, match=rf"group_size_overrides: {key.replace('.', '[.]')} names nothing"):
        convert(str(tiny_checkpoint()), tmp_path / "out", overrides={**QUICK, **options})
    assert not (tmp_path / "out").exists()


def test_a_size_that_does_not_divide_is_warned_of_for_its_module(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(intermediate=160)
    plan = plan_conversion(
        str(checkpoint), tmp_path / "out", overrides={**QUICK, "int4.group_size": 32, KEY: {"layers.1.down": 128}}
    )
    assert [w for w in plan.warnings if "group size" in w] == [
        "down: group size 128 as forced does not divide its 160 inputs, which are padded to 256; 32 divides it"
    ]


def test_info_names_all_sizes(tiny_checkpoint: Make, tmp_path: Path) -> None:
    artifact = Artifact.open(convert(str(tiny_checkpoint()), tmp_path / "out", overrides=MIXED).path)
    facts = _artifact_facts(artifact, tmp_path)
    assert facts["weights"]["down"]["int4"]["group_sizes"] == [32, 64]
    assert _format_text("int4", facts["weights"]["down"]["int4"]).startswith("int4 group 32 and 64 (")
    assert facts["weights"]["qkv"]["int4"]["group_sizes"] == [32, 128]
