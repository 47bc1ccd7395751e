"""Ctrl-C that falls into code whose exceptions Python ignores."""

import subprocess
import sys

import pytest
from places import ROOT

PROGRAM = """
import contextlib, signal, time
from bench.process.shutdown import interruptible
from gpt2.signals import heed_every_interrupt

class Dropping:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a script ignores it
heed_every_interrupt()
try:
    with BLOCK:
        Dropping()
        time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""


@pytest.mark.parametrize("block", ["contextlib.nullcontext()", "interruptible()"])
def test_control_c_within_a_destructor_is_heard_after_it(block: str) -> None:
    command = [sys.executable, "-c", PROGRAM.replace("BLOCK", block)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert (done.stdout, done.stderr) == ("heard\n", "")
