"""Ctrl-C that falls into code whose exceptions Python ignores."""

import subprocess
import sys

from places import ROOT

PROGRAM = """
import signal, time
from gpt2.signals import heed_every_interrupt

class Dropping:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

heed_every_interrupt()
try:
    Dropping()
    time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""


def test_control_c_within_a_destructor_is_heard_after_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert (done.stdout, done.stderr) == ("heard\n", "")
