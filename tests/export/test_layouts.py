"""Every family of a Decoder at every layout: logits and gradients of transformers, one file.

Each family is compared at one layout of every number of ranks; with the marker ``slow``, at all.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.groups import Group, Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.layers.spec.decoder_spec import FAMILIES, HYBRIDS
from megablocks_core.parallel import DataParallel, ShardedOptimizer, fully_shard, reduce_gradients
from megablocks_core.testing import ranks
from tests.export.references import EXPERTS, MODELS, TOKENS, cotangent, tiny, write_reference

# Layouts of so many ranks; the rest of the ranks is dp, over which rows are cut.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp2": {"tp": 2},
        "tp2-sequence": {"tp": 2, "sequence_parallel": True},
        "ep2": {"ep": 2},
        "tp2-etp2": {"tp": 2, "etp": 2},
        "tp2-ep2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    },
    4: {
        "tp4": {"tp": 4},
        "tp4-sequence": {"tp": 4, "sequence_parallel": True},
        "tp2-dp2": {"tp": 2},
        "ep2-edp2": {"ep": 2},
        "ep4": {"ep": 4},
        "tp2-dp2-ep2": {"tp": 2, "ep": 2},
        "tp2-dp2-ep2-sequence": {"tp": 2, "ep": 2, "sequence_parallel": True},
        "tp2-dp2-etp2": {"tp": 2, "etp": 2},
        "tp2-dp2-ep2-etp2": {"tp": 2, "ep": 2, "etp": 2},
    },
}
# So that every model is several files.
FILE_BYTES = 40_000
# Of norms over all ranks; both sides are float64 throughout.
TOLERANCE = 1e-12


def _cases(size: int) -> list[Any]:
    """Every family with every layout that it has; all but one of each are slow."""
    cases = []
    for number, family in enumerate(MODELS):
        cut = [
            name
            for name, sizes in LAYOUTS[size].items()
            if family in EXPERTS or not {"ep", "etp"} & sizes.keys()
        ]
        for name in cut:
            marks = () if name == cut[number % len(cut)] else pytest.mark.slow
            cases.append(pytest.param(family, name, marks=marks, id=f"{family}-{name}"))
    return cases


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """Folders of transformers' models, and of ours that one process wrote, by family."""
    return _References(tmp_path_factory.mktemp("references"))


@pytest.fixture
def reference(references, family):
    """transformers' ``weights``, ``gradients`` and ``logits``; ``ours``, by one process."""
    return references.folder(family)


class _References:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self, family: str) -> Path:
        made = self._folder / family
        if not made.exists():
            made.mkdir()
            write_reference(family, made)
            decoder = decoder_from_hf(made / "weights", dtype=torch.float64)
            save_hf(decoder, made / "ours", max_file_bytes=FILE_BYTES)
        return made


def test_every_family_has_a_case():
    assert {family for family, _ in MODELS.values()} == {*FAMILIES, *HYBRIDS}


@pytest.mark.parametrize("family", MODELS)
def test_one_process_has_the_logits_and_gradients_of_transformers(reference, family):
    _assert_equals(reference, {})


@pytest.mark.parametrize("family", MODELS)
def test_what_is_written_are_the_tensors_of_transformers_bit_for_bit(reference, tmp_path, family):
    ours = reference / "ours"
    verify(ours)
    written, expected = _tensors(ours), _tensors(reference / "weights")
    assert written.keys() == expected.keys() - ({"lm_head.weight"} - written.keys())
    for name, tensor in written.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
    again = decoder_from_hf(ours, dtype=torch.float64)
    save_hf(again, tmp_path / "again", max_file_bytes=FILE_BYTES)
    _assert_same_files(tmp_path / "again", ours)
    if "ssm" not in MODELS[family][0]:
        opened = transformers.AutoModelForCausalLM.from_pretrained(ours, dtype="auto")
        state = tiny(family).state_dict()
        assert opened.state_dict().keys() == state.keys()
        for name, tensor in opened.state_dict().items():
            # Some routers are float32 in transformers whatever a file holds.
            assert torch.equal(tensor, state[name].to(tensor.dtype)), name


@pytest.mark.parametrize(("family", "layout"), _cases(2))
@ranks(2, timeout=300)
def test_two_ranks_have_the_logits_and_gradients_of_transformers_and_write_one_file(
    reference, tmp_path, family, layout
):
    _assert_equals(reference, LAYOUTS[2][layout], tmp_path / "out")


@pytest.mark.parametrize(("family", "layout"), _cases(4))
@ranks(4, timeout=300)
def test_four_ranks_have_the_logits_and_gradients_of_transformers_and_write_one_file(
    reference, tmp_path, family, layout
):
    _assert_equals(reference, LAYOUTS[4][layout], tmp_path / "out")


WRAPPED = [
    ("qwen3", {"tp": 2}, "fully_shard"),
    ("qwen3_moe", {"ep": 2}, "fully_shard"),
    ("qwen3_moe", {"ep": 2}, "hybrid"),
    ("nemotron_h", {"tp": 2, "ep": 2}, "fully_shard"),
    ("nemotron_h", {"tp": 2, "ep": 2}, "DataParallel"),
    ("mixtral", {"tp": 2, "etp": 2}, "ShardedOptimizer"),
    ("granitemoehybrid", {}, "hybrid"),
    ("state-spaces-mamba", {"tp": 2}, "fully_shard"),
]


@pytest.mark.parametrize(("family", "sizes", "wrapper"), WRAPPED)
@ranks(4, timeout=300)
def test_wrapped_models_are_filled_and_written_bit_for_bit(
    reference, tmp_path, family, sizes, wrapper
):
    mesh, world = Mesh(**sizes), Mesh().group("dp")
    decoder = decoder_from_hf(reference / "weights", mesh=mesh, dtype=torch.float64)
    model = _wrapped(wrapper, decoder, mesh)
    save_hf(model, tmp_path / "wrapped", group=world, max_file_bytes=FILE_BYTES)
    dist.barrier()
    _assert_same_files(tmp_path / "wrapped", reference / "ours")

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    load_hf(model, reference / "ours", group=world)
    save_hf(model, tmp_path / "again", group=world, max_file_bytes=FILE_BYTES)
    dist.barrier()
    _assert_same_files(tmp_path / "again", reference / "ours")


@pytest.mark.parametrize("family", ["llama-biases", "qwen2_moe", "bamba"])
@ranks(1, 4)
def test_16_bit_files_come_back_bit_for_bit(tmp_path, family):
    """What a decoder keeps in float32 is 16 bits wide again where the folder had it so."""
    world = Mesh().group("dp")
    if world.rank == 0:
        tiny(family, torch.bfloat16).save_pretrained(tmp_path / "in")
    dist.barrier()
    decoder = decoder_from_hf(tmp_path / "in", mesh=Mesh(tp=world.size))
    assert {parameter.dtype for parameter in decoder.parameters()} >= {torch.bfloat16}
    save_hf(decoder, tmp_path / "out", group=world, dtype=torch.bfloat16)
    dist.barrier()
    written, expected = _tensors(tmp_path / "out"), _tensors(tmp_path / "in")
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert tensor.dtype == torch.bfloat16, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", ["nemotron_h"])
def test_f_175_a_conversion_never_touches_cuda(reference, tmp_path, family):
    code = """
import inspect, sys
import torch

def guarded(name, function):
    def call(*arguments, **options):
        caller = sys._getframe(1).f_globals["__name__"]
        assert not caller.startswith("megablocks_core"), f"{caller} calls torch.cuda.{name}"
        return function(*arguments, **options)
    return call

for name, function in inspect.getmembers(torch.cuda, inspect.isfunction):
    setattr(torch.cuda, name, guarded(name, function))
from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import save_hf, verify
save_hf(decoder_from_hf(sys.argv[1]), sys.argv[2], max_file_bytes=int(sys.argv[3]))
verify(sys.argv[2])
assert not torch.cuda.is_initialized()
"""
    out = tmp_path / "out"
    command = [sys.executable, "-c", code, reference / "weights", out, str(FILE_BYTES)]
    subprocess.run(command, check=True, timeout=120)
    _assert_same_files(out, reference / "ours")


def _wrapped(wrapper: str, decoder: Decoder, mesh: Mesh) -> torch.nn.Module:
    dp, experts = mesh.group("dp"), {"expert_group": mesh.expert.group("edp")}
    match wrapper:
        case "DataParallel":
            return DataParallel(decoder, group=dp, **experts)
        case "ShardedOptimizer":  # parameters become views of flat buckets
            ShardedOptimizer(decoder, torch.optim.AdamW, group=dp, **experts, lr=0.1)
            return decoder
        case "hybrid":
            inner, outer = mesh.split("dp", inner=2)
            return fully_shard(decoder, group=inner, replicate=outer, **experts)
    return fully_shard(decoder, group=dp, **experts)


def _assert_equals(reference: Path, layout: dict[str, Any], out: Path | None = None) -> None:
    """Logits, every gradient, and the files that are written, if ``out`` is given."""
    sizes = {name: size for name, size in layout.items() if name != "sequence_parallel"}
    mesh, world = Mesh(**sizes), Mesh().group("dp")
    dp = mesh.group("dp")
    if "sequence_parallel" in layout:
        decoder = _empty(reference / "weights", mesh, sequence_parallel=True)
        load_hf(decoder, reference / "weights", group=world)
    else:
        decoder = decoder_from_hf(reference / "weights", mesh=mesh, dtype=torch.float64)
    if out is not None:
        save_hf(decoder, out, group=world, max_file_bytes=FILE_BYTES)
        dist.barrier()
        _assert_same_files(out, reference / "ours")

    rows = slice(4 * dp.rank // dp.size, 4 * (dp.rank + 1) // dp.size)
    logits = decoder(TOKENS[rows], gather_logits=True).logits
    (logits * cotangent()[rows]).sum().backward()
    reduce_gradients(decoder, group=dp, expert_group=mesh.expert.group("edp"), reduction="sum")

    expected = load_file(reference / "logits.safetensors")["logits"][rows]
    wanted = _empty(reference / "gradients", mesh, **_without(layout, sizes))
    load_hf(wanted, reference / "gradients", group=world)
    pairs = {"logits": (logits, expected)}
    for (name, parameter), gradient in zip(
        decoder.named_parameters(), wanted.parameters(), strict=True
    ):
        assert parameter.grad is not None, name
        pairs[name] = parameter.grad, gradient
    _assert_close(pairs, world)


def _empty(folder: Path, mesh: Mesh, **options: Any) -> Decoder:
    return Decoder(
        DecoderSpec.from_hf(folder), mesh=mesh, device="meta", dtype=torch.float64, **options
    )


def _without(layout: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    return {name: value for name, value in layout.items() if name not in sizes}


def _assert_close(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], world: Group) -> None:
    """Each rank's slices of ours and of transformers' tensors, by the norms over all ranks."""
    squares = [
        torch.stack([(ours - theirs).square().sum(), theirs.square().sum()])
        for ours, theirs in pairs.values()
    ]
    norms = world.all_reduce(torch.stack(squares).detach()).sqrt().tolist()
    far = {name: error / (size or 1) for name, (error, size) in zip(pairs, norms, strict=True)}
    assert {name: error for name, error in far.items() if not error <= TOLERANCE} == {}


def _assert_same_files(out: Path, expected: Path) -> None:
    written, wanted = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (out, expected)
    )
    assert written.keys() == wanted.keys() and len(written) > 3
    for name, data in written.items():
        assert data == wanted[name], name


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    if (folder / "pytorch_model.bin").exists():
        return torch.load(folder / "pytorch_model.bin")
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for held in files for name, tensor in held.items()}
