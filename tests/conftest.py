"""Every test, here and on worker ranks: one thread, new memory full of NaN, fixed examples."""

import hypothesis
import torch

from megablocks_core.testing.memory import fill_empty_with_nan

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)


def pytest_addoption(parser):
    group = parser.getgroup("ranks")
    group.addoption("--delayed", action="store_true", help="messages between ranks come late")
    group.addoption("--mutation", help="a fault in groups, on all ranks: some test must fail")


def pytest_configure(config):
    torch.set_num_threads(1)
    fill_empty_with_nan()
    hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(config, items):
    """Late messages and faults concern tests in which ranks send: run no others."""
    if config.getoption("--delayed") or config.getoption("--mutation"):
        config.hook.pytest_deselected(items=[item for item in items if _num_ranks(item) < 2])
        items[:] = [item for item in items if _num_ranks(item) > 1]


def _num_ranks(item):
    return item.callspec.params.get("num_ranks", 1) if hasattr(item, "callspec") else 1
