"""Puts ladders/ into the wheel, where `bench run cpu` finds them; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithLadders(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "bench", "ladder", "files")
            shutil.copytree("ladders", target, dirs_exist_ok=True)


setup(cmdclass={"build_py": WithLadders})
