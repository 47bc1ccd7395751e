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
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(Path(__file__).parent / "ladders", target)


setup(cmdclass={"build_py": WithLadders})
