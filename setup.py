"""Maps the top-level `recipes/` into the wheel; everything else about the package stands in pyproject.toml.

`recipes/` lies beside the packages because people read and copy it. Installed, it is `fut_convert/recipes`, where
`importlib.resources` finds it.
"""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fut_convert*", "fut_runtime*"]), "fut_convert.recipes"],
    package_dir={"fut_convert.recipes": "recipes"},
    package_data={
        "fut_convert": ["py.typed", "data/*"],
        "fut_convert.recipes": ["*.yaml"],
        "fut_runtime": ["py.typed"],
    },
)
