"""Magnitudes are those of whole tensors, at any layout, and slabs are looked at in turn."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from megablocks_core.export import load_hf, slabs
from megablocks_core.export.described import described
from megablocks_core.export.quantising import amaxes as module
from megablocks_core.export.quantising.amaxes import amaxes
from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.testing import ranks
from tests.export.tiny_models import pretrained


@ranks(1, 2, 4)
def test_every_rank_gets_the_magnitudes_of_whole_tensors(tmp_path):
    reference = pretrained(tmp_path / "in", dtype=torch.bfloat16)
    world = Mesh().group("dp")
    decoder = Decoder(
        DecoderSpec.from_hf(tmp_path / "in"), mesh=Mesh(tp=world.size), dtype=torch.bfloat16
    )
    load_hf(decoder, tmp_path / "in")
    model = described(decoder, group=world, task="test", agreed={})
    seen, real = [], module.amax_of

    def noted(values):
        seen.append(values.numel())
        return real(values)

    with patch.object(slabs, "SLAB_BYTES", 256), patch.object(module, "amax_of", noted):
        found = amaxes(model.made, model.ours, model.collection, group=world)
    whole = {name: float(tensor.abs().max()) for name, tensor in reference.state_dict().items()}
    assert found == whole
    numbers = [sum(one) for one in world.all_gather_object(seen)]
    assert sum(numbers) == sum(tensor.numel() for tensor in reference.state_dict().values())
    assert max(seen) <= 128 and max(numbers) < sum(numbers) / world.size * 1.2
    if dist.is_initialized():
        dist.barrier()
