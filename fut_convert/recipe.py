"""Recipes: everything a conversion does, as checked data read from YAML."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fut_convert.errors import RecipeError
from fut_convert.group_sizes import GROUP_SIZES, check_overrides
from fut_convert.quantize.scales import SCALE_METHODS
from fut_runtime.artifact.fragment import DEFAULT_NIBBLE_ORDER, NIBBLE_ORDERS
from fut_runtime.artifact.json_text import excerpt, shown
from fut_runtime.artifact.manifest import WEIGHT_FORMATS
from fut_runtime.artifact.paths import plain_name

SCALE_DTYPES: tuple[str, ...] = ("bfloat16", "float16")
GPTQ_SOLVERS: tuple[str, ...] = ("fut", "auto-gptq")
#: Value of a choice that the conversion makes itself.
AUTO = "auto"
#: The scales that the solver of auto-gptq chooses.
AUTO_GPTQ_SCALES = "absmax_7.5"
#: Value of `calibration.text` that stands for the text that ships with this package.
BUILTIN_TEXT = "builtin"
#: What `calibration.text` begins with where it names a data set on the Hub.
HUB_PREFIX = "hub:"

#: The longest recipe that ships has some 2,000.
_MAX_BYTES = 100_000

#: Turns a value read from YAML or an option into the field's value, or raises ValueError saying what is expected.
Check = Callable[[Any], Any]
R = TypeVar("R")


def _one_of(*choices: Any) -> Check:
    def check(value: Any) -> Any:
        # YAML's true is not the number 1.
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        near = difflib.get_close_matches(excerpt(value).strip("'"), [str(c) for c in choices], n=1)
        raise ValueError(f"one of {', '.join(map(str, choices))}" + (f" (did you mean {near[0]}?)" if near else ""))

    return check


def _number(minimum: float, maximum: float = float("inf"), *, whole: bool = False) -> Check:
    def check(value: Any) -> Any:
        allowed = int if whole else (int, float)
        inside = isinstance(value, allowed) and minimum <= value <= maximum and value != float("inf")
        if isinstance(value, bool) or not inside:
            most = "" if maximum == float("inf") else f" and at most {maximum:g}"
            raise ValueError(f"{'a whole number' if whole else 'a number'} of at least {minimum:g}{most}")
        return value

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _text(value: Any) -> str:
    # Halves of surrogate pairs, which no file takes, would stop the conversion at its end.
    if not isinstance(value, str) or not value.strip() or value != value.encode(errors="ignore").decode():
        raise ValueError("a text")
    return value


def _formats(value: Any) -> tuple[str, ...]:
    expected = f"a list of {', '.join(WEIGHT_FORMATS)}, each at most once"
    if not isinstance(value, (list, tuple)) or not value or any(v not in WEIGHT_FORMATS for v in value):
        raise ValueError(expected)
    if len(set(value)) < len(value):
        raise ValueError(expected)
    # One order whatever the user wrote, so that equal recipes give equal artifacts.
    return tuple(f for f in WEIGHT_FORMATS if f in value)


def _key(default: Any, check: Check) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class Int4Recipe:
    """INT4 weights.

    Attributes:
        method: how codes are chosen; `rtn` rounds to nearest, `gptq` makes good for each column's error in later ones.
        scale_method: one of SCALE_METHODS, or `auto`: `weighted_search` when calibrated, else `search`.
        group_size: weights that share a scale, or `auto`: the largest of 128, 64 and 32 that divides the input,
            else 64 with padding.
        group_size_overrides: names of modules -> their group size, see `fut_convert.group_sizes`.
        gain: `runtime` leaves the RMSNorm gain to the decode path, `folded` multiplies it into the weights.
        scale_dtype: storage type of the scales.
        nibble_order: name of the fragment order, see `fut_runtime.artifact.fragment`.
        requantize: where the checkpoint brings INT4 codes of its own, `auto` keeps those that the artifact can hold and
            quantizes the others anew by the rest of this section, `always` all, `never` refuses to.
    """

    method: str = _key("rtn", _one_of("rtn", "gptq"))
    scale_method: str = _key(AUTO, _one_of(AUTO, *SCALE_METHODS))
    group_size: int | str = _key(AUTO, _one_of(AUTO, *GROUP_SIZES))
    group_size_overrides: Mapping[str, int] = field(default_factory=dict, metadata={"check": check_overrides})
    gain: str = _key("runtime", _one_of("runtime", "folded"))
    scale_dtype: str = _key("bfloat16", _one_of(*SCALE_DTYPES))
    nibble_order: str = _key(DEFAULT_NIBBLE_ORDER, _one_of(*NIBBLE_ORDERS))
    requantize: str = _key(AUTO, _one_of(AUTO, "always", "never"))


@dataclass(frozen=True)
class GptqRecipe:
    """How GPTQ runs, see `GptqSettings`; `solver` is `fut`, ours, or `auto-gptq`, that package's."""

    solver: str = _key("fut", _one_of(*GPTQ_SOLVERS))
    damping: float = _key(0.01, _number(0, 1))
    act_order: bool = _key(True, _flag)
    sweeps: int = _key(1, _number(0, 100, whole=True))
    correction: float = _key(0.5, _number(0, 1))


@dataclass(frozen=True)
class KVCacheRecipe:
    """KV cache of the decode path: 4 bits, with Hadamard rotation and zero points, or 16.

    `fold_v` multiplies the rotation of V into the weights, see `fut_convert.fold_values`.
    """

    bits: int = _key(4, _one_of(4, 16))
    rotation: bool = _key(True, _flag)
    zero_point: bool = _key(True, _flag)
    fold_v: bool = _key(False, _flag)


@dataclass(frozen=True)
class CalibrationRecipe:
    """Calibration: at most `windows` windows of `window_tokens` tokens each, packed from a text.

    Attributes:
        text: `builtin`, the path of a UTF-8 text or JSONL file, or `hub:…`, see `fut_convert.hub_dataset`.
        field: name of the text in each object of a JSONL file or row of a data set.
        allow_few_tokens: convert even where so little calibrates that statistics are hardly better than chance.
    """

    enabled: bool = _key(True, _flag)
    text: str = _key(BUILTIN_TEXT, _text)
    field: str = _key("text", _text)
    windows: int = _key(128, _number(1, whole=True))
    window_tokens: int = _key(2048, _number(2, whole=True))
    allow_few_tokens: bool = _key(False, _flag)


@dataclass(frozen=True)
class ActivationRecipe:
    """E4M3 activation scales: s = margin · amax / 448."""

    margin: float = _key(1.25, _number(1, 1e6))


@dataclass(frozen=True)
class Recipe:
    """A conversion.

    Attributes:
        name: what the file calls itself, by default the file's name without its suffix.
        description: one line for the reader.
        weights: formats every projection is stored in; E4M3 serves prefill, INT4 decode.
        int4: details of the INT4 weights, a head in INT4 included.
        gptq: details of `int4.method: gptq`.
        head: format of the output head. `bf16` stores it as it is, or not at all where it is tied to the embedding.
        kv_cache: details of the KV cache.
        calibration: details of the calibration.
        activation: details of the E4M3 activation scales.
        max_shard_gb: largest safetensors file, in 10⁹ bytes.
    """

    name: str = _key("default", _text)
    description: str = _key("built-in defaults", _text)
    weights: tuple[str, ...] = _key(("e4m3", "int4"), _formats)
    int4: Int4Recipe = field(default_factory=Int4Recipe)
    gptq: GptqRecipe = field(default_factory=GptqRecipe)
    head: str = _key("bf16", _one_of(*WEIGHT_FORMATS))
    kv_cache: KVCacheRecipe = field(default_factory=KVCacheRecipe)
    calibration: CalibrationRecipe = field(default_factory=CalibrationRecipe)
    activation: ActivationRecipe = field(default_factory=ActivationRecipe)
    max_shard_gb: float = _key(5, _number(0.001, 1e6))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form for the manifest. Of a calibration text it keeps the file name: artifacts hold no paths."""
        data = asdict(self)
        data["weights"] = list(self.weights)
        if not self.calibration.text.startswith(HUB_PREFIX):
            data["calibration"]["text"] = plain_name(Path(self.calibration.text).name)
        if self.int4.method != "gptq":
            del data["gptq"]
        return data

    @property
    def scale_method(self) -> str:
        """The scale method, with `auto` resolved."""
        if self.int4.scale_method != AUTO:
            return self.int4.scale_method
        if self.int4.method == "gptq" and self.gptq.solver == "auto-gptq":
            return AUTO_GPTQ_SCALES
        return "weighted_search" if self.calibration.enabled else "search"


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package."""
    return sorted(path.stem for path in _recipe_directory().glob("*.yaml"))


def load_recipe(recipe: str | Recipe, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe, apply overrides and resolve every `auto` that does not depend on a module.

    Args:
        recipe: name of a recipe that ships with the package, path of a YAML file, or a Recipe.
        overrides: dotted key -> value, as `{"int4.group_size": 64}`; None values are ignored.

    Raises:
        RecipeError: no such recipe, not YAML, an unknown key, a value outside its range, or a contradiction.
    """
    if isinstance(recipe, Recipe):
        where = f"recipe {recipe.name}"
        parsed = _read(Recipe, asdict(recipe), where, "")
    else:
        path = _find(recipe)
        where = str(path)
        data = _yaml(path)
        parsed = _read(
            Recipe, {"name": plain_name(path.stem), **data} if isinstance(data, Mapping) else data, where, ""
        )
    for key, value in (overrides or {}).items():
        if value is not None:
            parsed = _override(parsed, key, value)
    parsed = replace(parsed, int4=replace(parsed.int4, scale_method=parsed.scale_method))
    _check_consistency(parsed, where)
    return parsed


class _PlainYaml(yaml.SafeLoader):
    """YAML of plain values in which each stands once.

    A key that stands twice is an error instead of a value that is silently dropped. So are aliases: a few lines of them
    stand for more values than any memory holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not taken; write the value out", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.MarkedYAMLError(problem="expected keys and values", problem_mark=node.start_mark)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {shown(key.value)} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _yaml(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise RecipeError(f"{path}: has {size} bytes; a recipe has at most {_MAX_BYTES}")
        # A subclass of the safe loader: it makes nothing but plain values.
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_PlainYaml)
    except RecursionError as error:
        raise RecipeError(f"{path}: not a readable YAML file: it is nested too deeply") from error
    # Of values that are not what their form or tag promises (2024-99-99) the library raises these three.
    except (OSError, ValueError, KeyError, AttributeError, yaml.YAMLError) as error:
        reason = str(error).encode(errors="backslashreplace").decode()
        raise RecipeError(f"{path}: not a readable YAML file: {reason}") from error
    return {} if data is None else data


def _check_consistency(recipe: Recipe, where: str) -> None:
    if recipe.scale_method == "weighted_search" and not recipe.calibration.enabled and uses_int4(recipe):
        raise RecipeError(
            f"{where}: int4.scale_method weighted_search weighs errors by calibrated activations, but calibration is "
            "off; leave calibration on, or choose search (--scale-method search)"
        )
    if recipe.gptq.solver != "fut":
        _check_foreign_solver(recipe, where)
    if recipe.kv_cache.fold_v:
        _check_folded_values(recipe, where)
    if recipe.int4.method == "gptq" and uses_int4(recipe):
        if not recipe.calibration.enabled:
            raise RecipeError(
                f"{where}: int4.method gptq needs what calibration sees, but calibration is off; leave it on, or "
                "choose rtn (--method rtn)"
            )
        if "int4" not in recipe.weights:
            raise RecipeError(
                f"{where}: int4.method gptq calibrates a head in INT4 behind layers in INT4, but weights are "
                f"{', '.join(recipe.weights)}; add int4 to weights, or choose rtn (--method rtn)"
            )


def _check_folded_values(recipe: Recipe, where: str) -> None:
    cache = recipe.kv_cache
    if cache.bits != 4 or not cache.rotation:
        raise RecipeError(
            f"{where}: kv_cache.fold_v folds the rotation of V into the weights, but kv_cache.bits is {cache.bits} and "
            f"kv_cache.rotation {str(cache.rotation).lower()}, so nothing is rotated; leave fold_v out"
        )
    if "bf16" in recipe.weights:
        raise RecipeError(
            f"{where}: kv_cache.fold_v changes the weights of v and o, but weights has bf16, which stores the "
            "checkpoint's own; remove bf16 from weights, or leave fold_v out"
        )


def _check_foreign_solver(recipe: Recipe, where: str) -> None:
    solver = recipe.gptq.solver
    if recipe.int4.method != "gptq":
        raise RecipeError(
            f"{where}: gptq.solver {solver} chooses codes by GPTQ, but int4.method is {recipe.int4.method}; choose "
            "gptq (--method gptq), or leave the solver out"
        )
    if recipe.scale_method != AUTO_GPTQ_SCALES:
        raise RecipeError(
            f"{where}: gptq.solver {solver} chooses its own scales, 2·max/15, so int4.scale_method "
            f"{recipe.scale_method} cannot be kept; leave it at auto (or say {AUTO_GPTQ_SCALES}), or choose solver fut"
        )


def uses_gptq(recipe: Recipe) -> bool:
    """Whether codes of the layers are chosen by GPTQ."""
    return recipe.int4.method == "gptq" and "int4" in recipe.weights


def corrects(gptq: GptqRecipe) -> bool:
    """Whether GPTQ needs the checkpoint's own layers beside the quantized ones."""
    return gptq.solver == "fut" and gptq.correction > 0


def uses_int4(recipe: Recipe) -> bool:
    """Whether anything is stored in INT4."""
    return "int4" in (*recipe.weights, recipe.head)


def _recipe_directory() -> Path:
    """`recipes/` of the checkout, which an installation holds inside this package."""
    installed = Path(__file__).with_name("recipes")
    return installed if installed.is_dir() else Path(__file__).resolve().parents[1] / "recipes"


def _find(recipe: str) -> Path:
    shipped = recipe_names()
    if recipe in shipped:
        return _recipe_directory() / f"{recipe}.yaml"
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    raise RecipeError(f"recipe {recipe!r} is neither a file nor one of {', '.join(shipped)}{_nearest(recipe, shipped)}")


def _read(cls: type[R], data: Any, where: str, prefix: str) -> R:
    """Build a recipe dataclass from a mapping, strictly. `prefix` is the dotted place of `data` in the file."""
    if not isinstance(data, Mapping):
        raise RecipeError(f"{where}: {prefix.rstrip('.') or 'the recipe'} is {excerpt(data)}, expected keys and values")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            raise RecipeError(f"{where}: {_unknown(f'{prefix}{key}', [prefix + k for k in known])}")
        nested = _section(known[key])
        if nested is not None:
            values[key] = _read(nested, value, where, f"{prefix}{key}.")
        else:
            values[key] = _checked(known[key].metadata["check"], value, where, f"{prefix}{key}")
    return cls(**values)


def _override(recipe: Recipe, key: str, value: Any) -> Recipe:
    if key not in recipe_keys():
        raise RecipeError(_unknown(key, recipe_keys()))
    section, _, leaf = key.rpartition(".")
    target: Any = getattr(recipe, section) if section else recipe
    check = next(f.metadata["check"] for f in fields(target) if f.name == leaf)
    changed = replace(target, **{leaf: _checked(check, value, "override", key)})
    whole: Any = recipe
    result: Recipe = replace(whole, **{section: changed}) if section else changed
    return result


def _section(f: Field[Any]) -> type[Any] | None:
    """The dataclass of a key that holds further keys, or None for a plain one."""
    factory: Any = f.default_factory
    return factory if isinstance(factory, type) and is_dataclass(factory) else None


def recipe_keys() -> list[str]:
    """Every key a recipe may hold, dotted."""
    keys: list[str] = []
    for f in fields(Recipe):
        nested = _section(f)
        if nested is not None:
            keys.extend(f"{f.name}.{inner.name}" for inner in fields(nested))
        else:
            keys.append(f.name)
    return keys


def _checked(check: Check, value: Any, where: str, key: str) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise RecipeError(f"{where}: {key} is {excerpt(value)}, expected {error}") from error


def _unknown(key: str, known: Iterable[str]) -> str:
    return f"unknown key {excerpt(key)}{_nearest(key, known)}; known keys: {', '.join(known)}"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else ""
