"""Small models, and what torch's DCP makes of them."""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from megablocks_core import ckpt

RUN = {"versions": {"torch": "2.13"}, "spec": [1, {"a": 2.5, "none": None}], "empty": {}}


def trained(steps=2, *, seed=0, cut=False):
    """A model and its optimizer after some steps, over the world if ``cut``."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3, bias=False))
    if cut:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(4, 6, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer, step=7):
    return {"model": model, "optimizer": optimizer, "step": step, "run": RUN}


def save_ours(path, steps=2, **changes):
    model, optimizer = trained(steps)
    ckpt.save(path, {**state_of(model, optimizer), **changes})


def save_dcp(path: Path, model, optimizer, **others):
    weights, moments = get_state_dict(model, optimizer)
    values = {"model": weights, "optimizer": moments, "step": 7, "run": RUN, **others}
    quiet_save(values, path)


def quiet_save(values, path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(values, checkpoint_id=path, no_dist=not dist.is_initialized())


def assert_equal(model, other):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(a), local(b))


def local(tensor):
    """This rank's part of a tensor."""
    return getattr(tensor, "to_local", lambda: tensor)()


def full(tensor):
    """The whole of a DTensor, on all ranks."""
    return tensor.full_tensor().detach()
