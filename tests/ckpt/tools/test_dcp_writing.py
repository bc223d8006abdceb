"""torch's own ``load`` reads what is written; memory is bounded; a failure leaves nothing."""

import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from megablocks_core import ckpt
from megablocks_core.ckpt.format.manifest_reading import read_manifest
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.tools import checkpoint
from megablocks_core.ckpt.tools.dcp_writing import write_dcp
from megablocks_core.ckpt.tools.opening import open_checkpoint
from megablocks_core.files.progress import Progress
from megablocks_core.groups import Group
from megablocks_core.testing import ranks
from tests.ckpt.flat_optimizer import FlatAdam
from tests.ckpt.tools.saves import assert_equal, save_ours, state_of, step, trained


def write(source, target):
    write_dcp(target, open_checkpoint(source), progress=Progress("", 1))


def load_dcp(path, model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    values = {"model": weights, "optimizer": moments, "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(values, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return values["step"]


@ranks(1, 2, 4)
def test_torch_resumes_under_fsdp_as_if_nothing_had_happened(tmp_path):
    world = Group.of(dist.group.WORLD)
    model, optimizer = trained(cut=True)
    ckpt.save(tmp_path / "ours", state_of(model, optimizer), group=world)
    if world.rank == 0:
        write(tmp_path / "ours", tmp_path / "dcp")
    dist.barrier()
    other, its = trained(3, seed=1, cut=True)
    assert load_dcp(tmp_path / "dcp", other, its) == 7
    for number in (2, 3):
        step(model, optimizer, number)
        step(other, its, number)
    assert_equal(model, other)


def test_tensors_are_cut_into_slabs_and_joined_again(tmp_path, monkeypatch):
    model, optimizer = trained()
    ckpt.save(tmp_path / "ours", state_of(model, optimizer))
    monkeypatch.setattr(checkpoint, "SLAB_BYTES", 64)
    write(tmp_path / "ours", tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    assert len(metadata.state_dict_metadata["model.0.weight"].chunks) == 5
    other, its = trained(3, seed=1)
    load_dcp(tmp_path / "dcp", other, its)
    assert_equal(model, other)
    assert its.param_groups[0]["betas"] == (0.9, 0.999)


def test_memory_is_that_of_a_slab(tmp_path, monkeypatch):
    tensors = {f"t{number}": torch.full((2**20,), float(number)) for number in range(8)}
    ckpt.save(tmp_path / "ours", tensors)
    monkeypatch.setattr(checkpoint, "SLAB_BYTES", 2**20)
    held = _Watched(open_checkpoint(tmp_path / "ours"))
    write_dcp(tmp_path / "dcp", held, progress=Progress("", 1))
    assert held.slabs == 32
    assert held.most <= 2 * 2**20


class _Watched:
    """A checkpoint that counts the bytes of what it gave and is still in memory."""

    def __init__(self, inner):
        self.inner, self.state, self.tensors = inner, inner.state, inner.tensors
        self.given, self.slabs, self.most = [], 0, 0

    def read(self, name, box):
        tensor = _Counted(self.inner.read(name, box))
        self.slabs += 1
        self.given.append(tensor)
        self.most = max(self.most, sum(one.held() for one in self.given))
        return tensor

    def beside(self):
        return {}


class _Counted:
    """Stands for a tensor that the writer gets a copy of."""

    def __init__(self, tensor):
        self.tensor, self.copy = tensor, None

    def clone(self):
        self.copy = self.tensor.clone()
        return self.copy

    def held(self):
        return self.copy.untyped_storage().nbytes() if self.copy is not None else 2**20


def test_other_optimizers_and_names_come_back(tmp_path):
    model, _ = trained()
    optimizer = FlatAdam([list(model.parameters())])
    state = {"model": model, "optimizer": optimizer, "nested": {"a": {}, "b": [[], {}]}, "none": {}}
    ckpt.save(tmp_path / "ours", state)
    write(tmp_path / "ours", tmp_path / "dcp")
    one, other = open_checkpoint(tmp_path / "dcp"), open_checkpoint(tmp_path / "ours")
    assert one.state == other.state and one.tensors == other.tensors


def test_two_parameters_of_one_name_are_refused(tmp_path):
    models = {name: torch.nn.Linear(2, 2) for name in ("a", "b")}
    optimizer = torch.optim.Adam([p for model in models.values() for p in model.parameters()])
    for model in models.values():
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckpt.save(tmp_path / "ours", {**models, "optimizer": optimizer})
    with pytest.raises(ValueError, match="state of 'b/weight' and 'a/weight', which"):
        write(tmp_path / "ours", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


@pytest.mark.parametrize("number", ["1", "-1", "x"])
def test_a_tensor_of_no_group_is_refused(tmp_path, number):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), capturable=True)
    ckpt.save(tmp_path / "ours", {"model": model, "optimizer": optimizer})
    manifest = read_manifest(LocalPlace(tmp_path / "ours"))
    lr = manifest.tensors.pop("optimizer/param_groups.0/lr")
    manifest.tensors[f"optimizer/param_groups.{number}/lr"] = lr
    (tmp_path / "ours" / "manifest.json").write_text(manifest.text())
    with pytest.raises(ValueError, match=f"param_groups.{number}/lr is of no parameter group"):
        write(tmp_path / "ours", tmp_path / "dcp")


def test_a_failure_leaves_nothing_and_raises_its_cause(tmp_path):
    save_ours(tmp_path / "ours")
    path = tmp_path / "ours" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ckpt.CheckpointError, match="damaged"):
        write(tmp_path / "ours", tmp_path / "dcp")
    assert {one.name for one in tmp_path.iterdir()} == {"LATEST", "ours"}


def test_nothing_is_overwritten_and_urls_are_refused(tmp_path):
    save_ours(tmp_path / "ours")
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        write(tmp_path / "ours", tmp_path / "ours")
    with pytest.raises(ValueError, match="must be a folder of this machine"):
        write(tmp_path / "ours", "memory://x/dcp")
