"""A duty cycle in a process: its main thread sleeps after a little work as long as makes it so much slower.

A timer of the clock calls a handler in C, which asks how much CPU time the thread has spent since the last call and
sleeps for the rest of its cycle: every tenth of a millisecond or so, so that what the thread does between two
collectives is slower as a slower device is, and what other threads send for it is not.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

CORES = 1.6  # that the cycles of all ranks may sum to: what is left of two keeps them from waiting for each other
PERIOD = 150_000  # nanoseconds between two calls of the handler
LIBRARIES: list[ctypes.CDLL] = []  # which a handler is in must stay

SOURCE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double rest, before, debt;

static double seconds(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void sleep_for_the_rest(int signal) {
  int saved = errno;
  double now = seconds(CLOCK_THREAD_CPUTIME_ID), began;
  debt += (now - before) * rest;
  before = now;
  if (debt > 2e-5) {
    struct timespec t = {(time_t)debt, (long)(1e9 * (debt - (time_t)debt))};
    began = seconds(CLOCK_MONOTONIC);
    clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
    debt -= seconds(CLOCK_MONOTONIC) - began;
    before = seconds(CLOCK_THREAD_CPUTIME_ID);
  }
  errno = saved;
}

int start(double cycle, long period) {
  struct sigaction action;
  struct sigevent event;
  struct itimerspec spec = {{0, period}, {0, period}};
  timer_t timer;
  memset(&action, 0, sizeof action);
  memset(&event, 0, sizeof event);
  action.sa_handler = sleep_for_the_rest;
  action.sa_flags = SA_RESTART;
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGRTMIN + 5;
  event._sigev_un._tid = syscall(SYS_gettid);
  rest = 1 / cycle - 1;
  before = seconds(CLOCK_THREAD_CPUTIME_ID);
  if (sigaction(SIGRTMIN + 5, &action, NULL) || timer_create(CLOCK_MONOTONIC, &event, &timer)) return errno;
  return timer_settime(timer, 0, &spec, NULL) ? errno : 0;
}
"""


def cycles(ratio: Sequence[int]) -> tuple[float, ...]:
    """Return the part of a core that each rank gets, in this ratio.

    Args:
        ratio: of the ranks' speeds.

    Raises:
        ValueError: they come to more than `CORES`, so that ranks would wait for each other's cores.
    """
    each = min(CORES / sum(ratio), 1 / max(ratio))
    parts = tuple([each * x for x in ratio])
    if sum(parts) > CORES + 1e-9:
        raise ValueError(f"cycles {parts} come to more than {CORES} cores")
    return parts


def slow_down(cycle: float) -> None:
    """Let this thread, the process's main one, run for this part of the time, for as long as the process lives.

    Args:
        cycle: of 1.0 nothing is changed.

    Raises:
        RuntimeError: it is not the main thread, or the timer does not start.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a duty cycle is of the main thread, where a rank computes")
    if cycle >= 1:
        return
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "duty.c"), Path(folder, "duty.so")
        source.write_text(SOURCE)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-lrt"], check=True)
        LIBRARIES.append(ctypes.CDLL(str(library)))
    start = LIBRARIES[-1].start
    start.argtypes = [ctypes.c_double, ctypes.c_long]
    if number := start(cycle, PERIOD):
        raise RuntimeError(f"the timer of a duty cycle does not start: error {number}")
