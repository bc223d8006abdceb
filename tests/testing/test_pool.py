"""What the harness says when a body fails, hangs or dies, and what it does next."""

import os
import pickle
import signal
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from megablocks_core.testing import ranks
from megablocks_core.testing.pool import Pool, RanksError
from megablocks_core.testing.ranks import pool_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pool(request):
    """That of all other tests, which go on with it afterwards."""
    return pool_of(request.config, "gloo")


def _run(pool, body, timeout=60.0, **arguments):
    return pool.run(
        file=__file__,
        module=__name__,
        qualname=body.__name__,
        payload=pickle.dumps(arguments),
        size=2,
        timeout=timeout,
    )


@ranks(2)
def rank_1_fails_and_rank_0_waits_for_it():
    if dist.get_rank() == 1:
        print("about to fail")
        shapes = [3, 4]
        assert shapes == [3, 5]
    dist.barrier()


@ranks(2)
def rank_0_hangs():
    if dist.get_rank() == 0:
        wait_here()


def wait_here():
    dist.recv(torch.empty(1), src=1)


@ranks(2)
def rank_1_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@ranks(2)
def skips():
    pytest.skip("no reason")


@ranks(2)
def passes():
    dist.barrier()


def test_a_body_can_skip(pool):
    answers = _run(pool, skips)
    assert [(answer.outcome, answer.text) for answer in answers] == [("skipped", "no reason")] * 2


def test_the_first_failing_rank_is_shown_with_its_values_and_the_next_test_works(pool):
    with pytest.raises(RanksError) as caught:
        _run(pool, rank_1_fails_and_rank_0_waits_for_it)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 failed first")
    assert "assert [3, 4] == [3, 5]" in text  # rewritten as pytest does
    assert "about to fail" in text
    assert "worker.py" not in text
    assert [answer.outcome for answer in _run(pool, passes)] == ["passed", "passed"]


def test_a_hang_is_named_with_the_stuck_ranks_and_their_stacks(pool):
    with pytest.raises(RanksError) as caught:
        _run(pool, rank_0_hangs, timeout=2.0)
    text = str(caught.value)
    assert "no answer within 2 s from rank 0 of 2 (others: 1 passed)" in text
    assert "in wait_here" in text


def test_without_forks_each_worker_is_a_process_of_its_own():
    pool = Pool(forks=False)
    try:
        answers = _run(pool, passes)
    finally:
        pool.close()
    assert [answer.outcome for answer in answers] == ["passed", "passed"]


def test_a_rank_that_dies_is_named(pool):
    with pytest.raises(RanksError, match=r"rank 1 of 2 died \(SIGKILL\)"):
        _run(pool, rank_1_dies)


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_no_worker_outlives_its_pytest(end, tmp_path, launch):
    """Also when the body hangs and pytest gets no chance to clean up."""
    (tmp_path / "test_hang.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib
            import torch, torch.distributed as dist
            from megablocks_core.testing import ranks

            @ranks(2)
            def test_hang(tmp_path):
                mine = pathlib.Path(__file__).with_name(f"pid-{dist.get_rank()}")
                mine.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
                mine.with_suffix(".new").rename(mine)
                dist.recv(torch.empty(1), src=1 - dist.get_rank())
            """
        )
    )
    command = f"import pytest; pytest.main(['-q', '-p', 'no:cacheprovider', {str(tmp_path)!r}])"
    (pytest_process,) = launch("-c", command, cwd=tmp_path)
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    _wait_until(lambda: all(file.exists() for file in files), seconds=120)
    pytest_process.send_signal(end)
    pytest_process.wait(60)
    started = {int(pid) for file in files for pid in file.read_text().split()}
    assert len(started) == 3  # with the one whose forks they are
    _wait_until(lambda: not any(map(_alive, started)), seconds=30)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until(condition, *, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
