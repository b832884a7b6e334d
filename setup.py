"""Which packages there are. All other settings are in pyproject.toml.

Three folders make one import package; setuptools finds packages by itself only below a single one.
"""

from setuptools import find_packages, setup

FOLDERS = {"specdiff": "specdiff", "specdiff.drafters": "drafters", "specdiff.verify": "verify"}

setup(
    package_dir=FOLDERS,
    packages=[
        name
        for root, folder in FOLDERS.items()
        for name in (root, *(f"{root}.{below}" for below in find_packages(folder)))
    ],
)
