"""Says which folders go into the wheel; everything else about the package stands in pyproject.toml.

`recipes/` lies beside the packages because people read and copy it. In the wheel it is `fut_convert/recipes`.
"""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["fut_convert", "fut_convert.*", "fut_runtime", "fut_runtime.*"]),
        "fut_convert.data",
        "fut_convert.recipes",
    ],
    package_dir={"fut_convert.recipes": "recipes"},
    package_data={
        "fut_convert": ["py.typed"],
        "fut_convert.data": ["*.md", "*.txt"],
        "fut_convert.recipes": ["*.yaml"],
        "fut_runtime": ["py.typed"],
    },
)
