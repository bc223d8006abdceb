"""One rank of the test harness: a process that runs test bodies until its parent goes away.

It hears jobs on one socket. A reader thread takes them off, so that the end of the parent
(a clean exit, Ctrl-C or SIGKILL) is noticed even while a body hangs: the socket closes and
the worker leaves at once. Each job gets a fresh world, a fresh store and the same seed.
"""

import contextlib
import faulthandler
import gc
import importlib.util
import io
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, reduce
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

SEED = 1234


@dataclass(frozen=True)
class Job:
    """One test body for ``size`` ranks; ``payload`` is the pickle of its keyword arguments."""

    file: str
    module: str
    qualname: str
    payload: bytes
    size: int
    backend: str
    port: int
    number: int
    timeout: float
    sys_path: tuple[str, ...]
    mutation: str | None


@dataclass(frozen=True)
class Answer:
    """How a body ended on one rank; ``text`` is a skip's reason or an error's traceback."""

    outcome: Literal["passed", "skipped", "failed"]
    text: str
    output: str


def serve(fd: int, rank: int, stacks: str) -> None:
    """Run jobs from socket ``fd`` for ever. SIGUSR1 writes the Python stacks to ``stacks``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks_file = Path(stacks).open("w")  # noqa: SIM115 (open for the life of the process)
    faulthandler.enable(stacks_file)
    faulthandler.register(signal.SIGUSR1, stacks_file, all_threads=True)
    prepare()
    gc.freeze()  # else whatever collects garbage looks through all of torch

    parent = Connection(fd)
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(parent, jobs), daemon=True).start()
    parent.send(None)  # ready
    while True:
        job = jobs.get()
        if job is None:
            _leave_world()
        else:
            parent.send(run(job, rank))


def run(job: Job, rank: int) -> Answer:
    """Run one body in a world of its own and say how it ended."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            sys.path[:] = job.sys_path
            forget_compiled()
            _enter_world(job, rank)
            body = find(job.file, job.module, job.qualname)
            arguments = pickle.loads(job.payload)
            _seed()
            with _fault(job.mutation), _undone(arguments):
                body(**arguments)
        except BaseException as error:  # pytest.skip and pytest.fail are no Exceptions
            if type(error).__name__ == "Skipped":
                return Answer("skipped", str(error), output.getvalue())
            return Answer("failed", _traceback(error), output.getvalue())
    return Answer("passed", "", output.getvalue())


@contextmanager
def _undone(arguments: dict[str, Any]) -> Iterator[None]:
    """What the body patches by a ``monkeypatch`` is as before at its end: the process lives on."""
    try:
        yield
    finally:
        for given in arguments.values():
            if type(given).__name__ == "MonkeyPatch":
                given.undo()


def find(file: str, module: str, qualname: str) -> Callable[..., None]:
    """Return the body of the decorated test ``qualname`` in ``file``, imported as ``module``."""
    loaded = sys.modules.get(module)
    if loaded is None or getattr(loaded, "__file__", None) != file:
        loaded = _import_with_asserts_rewritten(file, module)
    test: Any = reduce(getattr, qualname.split("."), loaded)
    return test.body


def _import_with_asserts_rewritten(file: str, name: str) -> ModuleType:
    """Import a test file as pytest does, so that a failed ``assert`` shows its values."""
    import ast

    from _pytest.assertion.rewrite import rewrite_asserts

    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    rewrite_asserts(tree, source, file)
    sys.modules[name] = module
    try:
        exec(compile(tree, file, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def forget_compiled() -> None:
    """Make every test compile as the first one does.

    ``torch.compile`` remembers for each line of code the sizes it has seen, and treats what
    varied as unknown: after other tests the same test compiles another graph, many times slower.
    """
    if "torch._dynamo" in sys.modules:
        import torch

        torch._dynamo.reset()


def _fault(name: str | None) -> AbstractContextManager[None]:
    if name is None:
        return contextlib.nullcontext()
    from megablocks_core.testing.mutations import mutation

    return mutation(name)


def prepare() -> None:
    """One thread, new memory full of NaN, and few searches for garbage: each takes tenths."""
    import torch

    from megablocks_core.testing.memory import fill_empty_with_nan

    gc.set_threshold(20_000, 20, 50)
    torch.set_num_threads(1)
    fill_empty_with_nan()


def _enter_world(job: Job, rank: int) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    _leave_world()
    if job.backend == "nccl":
        import torch

        torch.cuda.set_device(rank)
    elif job.backend == "delayed":
        from megablocks_core.testing.delayed import register

        register()
    dist.init_process_group(
        job.backend,
        store=PrefixStore(f"job {job.number}", _store(job.port)),
        rank=rank,
        world_size=job.size,
        # Later than the parent's limit: a hang is reported there, with every rank's stack.
        timeout=timedelta(seconds=job.timeout + 60),
    )


@lru_cache(maxsize=1)
def _store(port: int) -> "TCPStore":
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def _leave_world() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        # The end of each waits 10 ms and more for a thread of gloo.
        threading.Thread(target=groups.clear, daemon=True).start()
    if "torch.distributed.tensor" in sys.modules:
        # Its caches hold meshes of groups that are gone, and give them to tensors on equal ones.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _traceback(error: BaseException) -> str:
    """Return the traceback from the body on, without the frames of this harness."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code is run.__code__:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb))


def _read(parent: Connection, jobs: "queue.SimpleQueue[Job | None]") -> None:
    while True:
        try:
            jobs.put(parent.recv())
        except (EOFError, OSError):
            os._exit(1)
