"""Packaging that pyproject.toml cannot say: configs/ is installed as the data of the package service.configs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["service", "service.*", "hiera_optim", "hiera_optim.*"]), "service.configs"],
    package_dir={"service.configs": "configs"},
)
