"""Texts reach all ranks and objects the first one, as they were."""

import pytest

from megablocks_core.ckpt.transfer.gathering import all_texts, at_first_rank
from megablocks_core.groups import Group, Mesh
from megablocks_core.testing import ranks


@ranks(1, 2, 4)
def test_every_rank_has_the_texts_of_all(tmp_path):
    world = Mesh().group("dp")
    found = all_texts([b"alike", b"%d" % world.rank * world.rank, b""], group=world)
    assert found == [[b"alike", b"%d" % rank * rank, b""] for rank in range(world.size)]
    assert len({id(texts[0]) for texts in found}) == 1


@ranks(1, 2, 4)
def test_the_first_rank_has_the_objects_of_all(tmp_path):
    world = Mesh().group("dp")
    for size in (0, 1, 5000):
        found = at_first_rank({"rank": world.rank, "more": [1.5] * size}, group=world)
        expected = [{"rank": rank, "more": [1.5] * size} for rank in range(world.size)]
        assert found == (expected if world.rank == 0 else [])


@ranks(2)
def test_texts_travel_compressed_and_objects_not_to_all(tmp_path):
    world, seen = Mesh().group("dp"), []
    real = Group.all_gather_object

    def noted(group, value):
        seen.append(value)
        return real(group, value)

    text = b"".join(b"model/layers.%d.weight" % number for number in range(1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_gather_object", noted)
        all_texts([text], group=world)
        at_first_rank(text, group=world)
    (small,), number = seen
    assert len(small) < len(text) / 5
    assert isinstance(number, int)
