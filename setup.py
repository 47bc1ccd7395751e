"""Puts ladders/ and the published figures into the wheel, where commands find them by name."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithLadders(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            here, target = Path(__file__).parent, Path(self.build_lib, "bench", "ladder", "files")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(here / "ladders", target)
            shutil.copytree(here / "results" / "published", target / "published")


setup(cmdclass={"build_py": WithLadders})
