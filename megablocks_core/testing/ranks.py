"""``@ranks(1, 2, 4)`` runs a test on every rank of worlds of 1, 2 and 4 processes.

    @ranks(1, 2, 4)
    def test_sum_of_ones():
        group = Group.of(dist.group.WORLD)
        assert group.all_reduce(torch.ones(())) == group.size

Every size is a pytest test of its own (``test_sum_of_ones[2ranks]``). The body runs in worker
processes that live on between tests, each with one thread; it finds an initialised world
(gloo, rendezvous by a file), the same seed on every rank, and ``torch.empty`` filled with NaN.
Parameters and fixtures arrive by pickle: ``tmp_path`` works, and ``monkeypatch`` on each rank for
itself. A module-level test is found again by its file and name.

The first rank that fails is shown as the cause (its peers only wait for it); ranks that never
answer are named with their Python stacks. A body that calls ``pytest.skip`` skips.
"""

import inspect
import pickle
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from megablocks_core.testing.pool import Pool, RanksError


def ranks(
    *sizes: int, backend: str = "gloo", timeout: float = 60.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on every rank of a world, once for each of ``sizes``.

    ``backend="nccl"`` gives each rank one GPU and marks the test ``gpu``. ``timeout`` is the
    time in seconds after which ranks without an answer count as hanging.

    Raises:
        ValueError: No size, a size below one, or a test that is not at module level.
    """
    import pytest

    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes={sizes} must be one or more positive numbers of ranks")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        name = body.__qualname__
        if "." in name:
            raise ValueError(f"body={name} must be a function at module level")
        parameters = inspect.signature(body).parameters.values()

        @wraps(body)
        def test(num_ranks: int, request: Any, **arguments: Any) -> None:
            _run(body, num_ranks, request.config, arguments, backend=backend, timeout=timeout)

        extra = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("num_ranks", "request")
        ]
        test.__signature__ = inspect.Signature([*extra, *parameters])  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        if backend == "nccl":
            test = pytest.mark.gpu(test)
        return pytest.mark.parametrize("num_ranks", sizes, ids=[f"{n}ranks" for n in sizes])(test)

    return decorate


def _run(
    body: Callable[..., None],
    size: int,
    config: Any,
    arguments: dict[str, Any],
    *,
    backend: str,
    timeout: float,
) -> None:
    import pytest

    if backend == "gloo" and config.getoption("--delayed", default=False):
        backend = "delayed"
    try:
        answers = pool_of(config, backend).run(
            file=inspect.getfile(body),
            module=body.__module__,
            qualname=body.__qualname__,
            payload=_pickled(arguments),
            size=size,
            backend=backend,
            timeout=timeout,
            mutation=config.getoption("--mutation", default=None),
        )
    except RanksError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    for rank, answer in enumerate(answers):
        if answer.output:
            sys.stdout.write(f"rank {rank}:\n{answer.output}")  # pytest shows it on failure
    for answer in answers:
        if answer.outcome == "skipped":
            pytest.skip(answer.text)


def pool_of(config: Any, backend: str) -> Pool:
    """Return this pytest session's pool for a back end, made on first use, closed at the end."""
    pools = _pools.setdefault(config, {})
    cuda = backend == "nccl"
    if cuda not in pools:
        pools[cuda] = Pool(forks=False) if cuda else Pool()
        config.add_cleanup(pools[cuda].close)
    return pools[cuda]


_pools: WeakKeyDictionary[Any, dict[bool, Pool]] = WeakKeyDictionary()


def _pickled(arguments: dict[str, Any]) -> bytes:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(f"{name}={value!r} must be picklable to reach the ranks") from error
    return pickle.dumps(arguments)
