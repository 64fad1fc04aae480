"""A process ends with the one that started it, and with nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from tests.process_support import still_running

GONE_WITHIN_S = 5.0

PARENT = """
import multiprocessing, os, signal, sys, threading, time
from daric_rag.engine.death_watch import watch_parent

def live(deaf):
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch_parent()
    watch_parent()
    print(os.getpid(), threading.active_count(), flush=True)
    time.sleep(60)

process = multiprocessing.get_context("fork").Process(target=live, args=("deaf" in sys.argv,))
starting = threading.Thread(target=process.start)
starting.start()
starting.join()
if "fork" in sys.argv and not os.fork():
    # Holds all that the parent held when it was forked.
    time.sleep(60)
watch_parent()
assert threading.active_count() == 1, "nobody started this process to watch over it"
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "kill"),
    [
        ("alone", signal.SIGKILL),
        ("alone", signal.SIGTERM),
        ("fork", signal.SIGKILL),
        ("deaf", signal.SIGKILL),
    ],
)
def test_a_child_ends_with_its_parent_only(how: str, kill: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    number, threads = map(int, parent.stdout.readline().split())
    assert threads == 2  # however often it was asked to watch
    child = psutil.Process(number)
    with pytest.raises(psutil.TimeoutExpired):
        child.wait(1.2)  # the thread that started it is long gone, its parent is not
    others = [other for other in psutil.Process(parent.pid).children() if other != child]
    parent.send_signal(kill)
    parent.wait()
    left = still_running([child], GONE_WITHIN_S)
    for other in others:
        other.kill()
    assert left == []
