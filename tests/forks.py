"""Python processes that start at once: forks of one that has loaded torch and done nothing else.

A script or a text of code runs in each as ``python SCRIPT`` or ``python -c CODE`` would run it, in
a folder and an environment of its own; only what takes seconds to load is there already. What was
loaded beforehand is none of ours.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

LOADED = "torch", "torch._dynamo", "torch.distributed", "numpy", "safetensors.torch"


class ForkServer:
    """Starts processes; those that still run when it is closed are killed."""

    def __init__(self, folder, *loaded):
        self.folder, self.count = folder, 0
        command = [sys.executable, __file__, *LOADED, *loaded]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # read when torch is loaded
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=one_thread)

    def start(self, *words, cwd=None, environment=None):
        """A process of ``words``, a script and its arguments, or "-c" and code."""
        self.count += 1
        place = self.folder / str(self.count)
        place.mkdir()
        request = {
            "words": [str(word) for word in words],
            "cwd": str(cwd or os.getcwd()),
            "environment": {**os.environ, **(environment or {})},
            "place": str(place),
        }
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Forked(place)

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)


class Forked:
    """One process, with what is used here of ``subprocess.Popen``."""

    def __init__(self, place):
        self.place = place
        self.pid = int(_content_of(place / "pid", seconds=300))

    @property
    def returncode(self):
        return self.poll()

    def poll(self):
        with contextlib.suppress(FileNotFoundError):
            return int((self.place / "code").read_text())
        return None

    def wait(self, timeout=300):
        return int(_content_of(self.place / "code", seconds=timeout))

    def communicate(self, timeout=300):
        self.wait(timeout)
        return tuple((self.place / name).read_text() for name in ("out", "err"))

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _content_of(path, *, seconds):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name} within {seconds} s"
        time.sleep(0.01)
    return path.read_text()


def _publish(path, text):
    new = path.with_suffix(".new")
    new.write_text(str(text))
    new.rename(path)


def serve():
    """Fork for each line of standard input; return what to do in the child, or end."""
    running, pending = {}, b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if not pid:
                    return request
                running[pid] = Path(request["place"])
                _publish(running[pid] / "pid", pid)
        _report_ended(running)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    sys.exit()


def _report_ended(running):
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        _publish(running.pop(pid) / "code", os.waitstatus_to_exitcode(status))


def become(request):
    """Take the folder, the environment, the output and the arguments of a process."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in ((0, os.devnull), (1, "out"), (2, "err")):
        path = Path(request["place"]) / name
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.argv = request["words"]


def end(code):
    """Leave as Python does, but without taking apart all that was loaded: that takes a second."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(words):
    """Run a script, or a text of code, as Python does; the exit code."""
    try:
        if words[0] == "-c":
            sys.path[0] = ""
            code = sys.argv.pop(1)
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path[0] = os.path.dirname(words[0])
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    import importlib

    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # else each process looks through all of it whenever it collects garbage
    become(serve())
    atexit.register(gc.unfreeze)  # extensions complain of what still lives when Python ends
    end(run(sys.argv))
