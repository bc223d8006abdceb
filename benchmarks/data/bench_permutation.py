"""The native permutation against Grain's compiled index shuffle and its own NumPy twin.

Grain shuffles one index a call, so its time is that of calls from Python. The promise is 30 ns an
index; ``ns_per_index`` says what it was.
"""

import numpy as np

from benchmarks.data.peers import GRAIN, TWIN, grain_shuffle
from benchmarks.timing import report, take_turns
from megablocks_core.data import Permutation, permutation

CALLS = 10_000


def main() -> None:
    """Print one JSON line a case."""
    shuffle = grain_shuffle()
    for size in (1000, 10**6 + 3, 2**30, 2**40 + 1):
        order, places = Permutation(size, seed=1), np.arange(1 << 18) % size
        native = permutation._native
        permutation._native = None
        twin = order(places)
        permutation._native = native

        def ours(order: Permutation = order, places: np.ndarray = places) -> np.ndarray:
            return order(places)

        def numpy(order: Permutation = order, places: np.ndarray = places) -> np.ndarray:
            return order._shuffle_numpy(places)

        assert np.array_equal(ours(), twin)
        times = take_turns(ours, numpy)
        fastest = round(1e9 * min(times.ours) / len(places), 1)
        case = {"size": size, "places": len(places), "ns_per_index": str(fastest)}
        report(times, benchmark="data/permutation", peer=TWIN, case=case)
        if shuffle is None or size > 2**31:
            continue

        def few(order: Permutation = order, places: np.ndarray = places) -> np.ndarray:
            return order(places[:CALLS])

        def grain(last: int = size - 1, places: np.ndarray = places) -> list[int]:
            return [
                shuffle(index=place, max_index=last, seed=1, rounds=4)
                for place in places[:CALLS].tolist()
            ]

        assert sorted(grain()) == sorted(set(grain())) or size < CALLS
        report(
            take_turns(few, grain),
            benchmark="data/permutation",
            peer=GRAIN,
            case={"size": size, "places": CALLS},
            limit=1.0,
        )


if __name__ == "__main__":
    main()
