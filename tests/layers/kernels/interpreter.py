"""Runs the bodies of tests where Triton's kernels are interpreted: in a process of their own.

Triton reads TRITON_INTERPRET when a module with kernels is imported, so it cannot be changed here.
"""

import functools
import importlib.util
import inspect
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

from megablocks_core.testing.memory import fill_empty_with_nan


def interpreted(test):
    """The same test, whose body runs in the interpreting process."""
    path, name = inspect.getfile(test), test.__name__

    @functools.wraps(test)
    def run(**parameters):
        _process().submit(_body, path, name, parameters).result(timeout=300)

    return run


@functools.cache
def _process():
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        spawn = multiprocessing.get_context("spawn")
        process = ProcessPoolExecutor(1, mp_context=spawn, initializer=_start)
        process.submit(int).result(timeout=120)
    finally:
        del os.environ["TRITON_INTERPRET"]
    return process


def _start():
    torch.set_num_threads(1)
    fill_empty_with_nan()


@functools.cache
def _module(path):
    spec = importlib.util.spec_from_file_location("interpreted_tests", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _body(path, name, parameters):
    torch.manual_seed(0)
    getattr(_module(path), name).__wrapped__(**parameters)
