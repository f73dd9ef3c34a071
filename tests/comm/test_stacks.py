"""Frames of a thread that runs on are read without harm to it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import gc, sys, threading, time
from autotp.comm.waiting import stack

def walk(thread):  # without the care that `stack` takes
    frame = sys._current_frames().get(thread)
    while frame is not None:
        frame = frame.f_back

class Yields:
    def __del__(self):
        time.sleep(0)  # another thread runs while this is collected

def deep(n):
    return deep(n - 1) + 1 if n else 0

def run():
    while time.process_time() < end:
        deep(200)

end = time.process_time() + 3
thread = threading.Thread(target=run, daemon=True)
thread.start()
gc.set_threshold(5)
read = {"stack": stack, "walk": walk}[sys.argv[1]]
while time.process_time() < end:
    for _ in range(3):
        cycle = Yields()
        cycle.own = cycle
    read(thread.ident)
assert gc.isenabled()
"""


@pytest.mark.parametrize("reader", ["stack", "walk"])
def test_a_running_thread_is_read(reader):
    """The negative control is what Python 3.11 does where garbage is collected meanwhile; later ones wait with it."""
    if reader == "walk" and sys.version_info >= (3, 12):
        pytest.skip("this Python collects between instructions only")
    code = subprocess.run([sys.executable, "-c", SCRIPT, reader], env=os.environ, timeout=900).returncode
    assert (code == 0) == (reader == "stack")
