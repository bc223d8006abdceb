"""Calibration finds the magnitudes that transformers' modules see, at every layout."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export.quantising import Fp8, Int8
from megablocks_core.export.quantising.calibrating import calibrate
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from tests.export.references import TOKENS, InFloat64, tiny

CASES = ("llama-biases", "qwen3", "mixtral", "qwen3_moe", "nemotron_h")
BATCHES = list(TOKENS.split(2))


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of tiny models of transformers by case, and what hand-made hooks see of them."""
    return _Folders(tmp_path_factory.mktemp("calibrating"))


class _Folders:
    def __init__(self, folder):
        self._folder = folder

    def folder(self, case):
        made = self._folder / case
        if not made.exists():
            tiny(case).save_pretrained(made)
        return made


@pytest.fixture
def folder(folders, case):
    return folders.folder(case)


@pytest.mark.filterwarnings("ignore:no token, or zeros alone")
@pytest.mark.parametrize("case", CASES)
def test_ours_and_transformers_modules_see_the_same(folder, case):
    ours = calibrate(decoder_from_hf(folder, dtype=torch.float64), BATCHES, recipe=Fp8())
    model = tiny(case)
    with InFloat64():
        theirs = calibrate(model, BATCHES, recipe=Fp8())
    _assert_close(ours, theirs)


@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_magnitudes_are_those_that_plain_hooks_and_the_cache_show(folder, case):
    ours = calibrate(decoder_from_hf(folder, dtype=torch.float64), BATCHES, recipe=Fp8())
    model, inputs = tiny(case), {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in path:
            module.register_forward_hook(
                lambda _, args, __, name=f"{path}.weight": inputs.__setitem__(
                    name, max(inputs.get(name, 0.0), float(args[0].detach().abs().max()))
                )
            )
    with InFloat64(), torch.no_grad():
        cache = model(TOKENS, use_cache=True).past_key_values
    keys, values = {}, {}
    for number, layer in enumerate(cache.layers):
        before = f"model.layers.{number}.self_attn"
        keys[f"{before}.k_proj.weight"] = float(layer.keys.abs().max())
        values[f"{before}.v_proj.weight"] = float(layer.values.abs().max())
    assert ours.inputs == pytest.approx(inputs, rel=1e-6)
    assert ours.keys == pytest.approx(keys, rel=1e-6)
    assert ours.values == pytest.approx(values, rel=1e-6)


def test_gpt2_has_the_names_of_its_files():
    import transformers

    torch.manual_seed(1)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=51, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    recipe = Fp8(include=("transformer.h.*.attn.*", "transformer.h.*.mlp.*"))
    found = calibrate(model, BATCHES, recipe=recipe)
    layers = [f"transformer.h.{number}" for number in range(2)]
    assert list(found.keys) == [f"{layer}.attn.c_attn.weight" for layer in layers]
    assert list(found.values) == list(found.keys)
    assert len(found.inputs) == 8
    layer: Any = model.transformer.h[0]
    with torch.no_grad():
        embedded = model.transformer.wte(TOKENS) + model.transformer.wpe(torch.arange(7))
        normed = layer.ln_1(embedded)
        _, k, v = layer.attn.c_attn(normed).split(16, dim=-1)
    name = "transformer.h.0.attn.c_attn.weight"
    found_here = [found.inputs[name], found.keys[name], found.values[name]]
    assert found_here == pytest.approx([float(x.abs().max()) for x in (normed, k, v)], rel=1e-5)


LAYOUTS = {
    "llama-biases": [{"tp": 2}, {"tp": 4}],
    "qwen3": [{"tp": 2}, {"tp": 4}],
    "mixtral": [
        {"tp": 2},
        {"ep": 2},
        {"tp": 4},
        {"ep": 4},
        {"tp": 2, "etp": 2},
        {"tp": 2, "ep": 2},
    ],
    "nemotron_h": [{"tp": 2}, {"ep": 2}],
}


@pytest.mark.parametrize("case", LAYOUTS)
@ranks(1, 2, 4)
def test_every_layout_finds_the_same(folder, case):
    alone = calibrate(decoder_from_hf(folder, dtype=torch.float64), BATCHES, recipe=Fp8())
    size = dist.get_world_size()
    for sizes in LAYOUTS[case]:
        if size % max(sizes.get("tp", 1), sizes.get("ep", 1) * sizes.get("etp", 1)):
            continue
        mesh = Mesh(**sizes)
        model: Any = decoder_from_hf(folder, mesh=mesh, dtype=torch.float64)
        dp = mesh.group("dp")
        # Every batch [2 T] goes to one of the data-parallel ranks; of other layouts to all.
        mine = [batch.chunk(2)[dp.rank % 2] if dp.size > 1 else batch for batch in BATCHES]
        found = calibrate(model, mine, recipe=Fp8(), group=Mesh().group("dp"))
        _assert_close(found, alone)
        assert len(set(Mesh().group("dp").all_gather_object(str(found)))) == 1


@pytest.mark.parametrize("case", ["mixtral"])
def test_experts_without_tokens_have_what_others_of_their_layer_saw(folder, case):
    model: Any = decoder_from_hf(folder, dtype=torch.float64)
    whole = calibrate(model, BATCHES, recipe=Int8())
    with torch.no_grad():  # The first layer's last expert is never chosen.
        gate = model.model.layers[0].mlp.gate
        gate.weight[3] = gate.weight[1]  # ties go to the lowest index, and two are chosen
        gate.weight[2] = gate.weight[1]
        model.model.layers[1].mlp.experts.gate_proj[2].zero_()  # whose hidden activation is zero
    names = [
        f"model.layers.0.block_sparse_moe.experts.3.{part}.weight" for part in ("w1", "w3", "w2")
    ]
    with pytest.warns(UserWarning, match="no token, or zeros alone, came to ") as told:
        found = calibrate(model, BATCHES, recipe=Int8())
    for name in names:
        assert name in str(told[0].message)
        others = [found.inputs[name.replace("experts.3", f"experts.{one}")] for one in range(3)]
        assert found.inputs[name] == max(others)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    assert name in str(told[0].message)
    others = [found.inputs[name.replace("experts.2", f"experts.{one}")] for one in (0, 1, 3)]
    assert found.inputs[name] == max(others)
    assert found.inputs.keys() == whole.inputs.keys()
    assert not found.keys and not found.values


@pytest.mark.parametrize("case", ["qwen3"])
def test_modes_and_hooks_are_as_before_also_after_an_error(folder, case):
    model: Any = decoder_from_hf(folder, dtype=torch.float64)
    model.train()
    model.model.layers[0].eval()
    seen = []
    layer = model.model.layers[1].mlp
    handle = layer.register_forward_hook(
        lambda module, *_: seen.append((module.training, torch.is_grad_enabled()))
    )
    before = [(module.training, _hooks(module)) for module in model.modules()]
    calibrate(model, BATCHES, recipe=Fp8())
    assert seen == [(False, False)] * 2
    assert [(module.training, _hooks(module)) for module in model.modules()] == before
    with pytest.raises(ValueError, match="positions"):
        calibrate(
            model, [BATCHES[0], {"tokens_T": TOKENS, "positions": TOKENS[0, :2]}], recipe=Fp8()
        )
    assert [(module.training, _hooks(module)) for module in model.modules()] == before
    handle.remove()


@pytest.mark.parametrize("case", ["qwen3"])
def test_what_cannot_be_is_refused_by_name(folder, case):
    model: Any = decoder_from_hf(folder, dtype=torch.float64)
    for batches, rule in (
        ([], "batches must hold at least one"),
        ([BATCHES[0], [1, 2]], r"batches\[1\]=\[1, 2\] must be a tensor"),
        ([BATCHES[0], TOKENS[:0]], r"batches\[1\] of shape \(0, .* must hold at least one"),
        ([{1: TOKENS}], r"batches\[0\]=\{1: .* must be a tensor, or arguments by name"),
    ):
        with pytest.raises(ValueError, match=rule):
            calibrate(model, batches, recipe=Fp8())
    with pytest.raises(ValueError, match="recipe='fp8' must be a recipe"):
        calibrate(model, BATCHES, recipe="fp8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="must take a weight of the model"):
        calibrate(model, BATCHES, recipe=Fp8(exclude=("*",)))
    with pytest.raises(ValueError, match="model must have values, but .* are on meta"):
        calibrate(deepcopy(model).to("meta"), BATCHES, recipe=Fp8())
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"inputs of model\.layers\.1\..* must be finite"):
        calibrate(model, BATCHES, recipe=Fp8())


@pytest.mark.parametrize("case", ["qwen3"])
def test_batches_may_be_arguments_by_name_and_progress_hears_of_each(folder, case):
    model: Any = decoder_from_hf(folder, dtype=torch.float64)
    told = []
    named = calibrate(
        model,
        [{"tokens_T": batch} for batch in BATCHES],
        recipe=Fp8(),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 2), (2, 2)]
    told.clear()
    plain = calibrate(model, iter(BATCHES), recipe=Fp8(), progress=lambda *both: told.append(both))
    assert told == [(1, 0), (2, 0)]
    assert plain == named


@pytest.mark.parametrize("case", ["qwen3"])
@ranks(2)
def test_ranks_with_other_numbers_of_batches_or_an_error_raise_together(folder, case):
    world = Mesh().group("dp")
    model: Any = decoder_from_hf(folder, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"as many on all ranks, but ranks \[1\] have 1"):
        calibrate(model, BATCHES[: 2 - world.rank], recipe=Fp8(), group=world)
    batches = [BATCHES[0], "text" if world.rank else BATCHES[1]]
    with pytest.raises(ValueError, match=r"batches\[1\]='text' must be a tensor"):
        calibrate(model, batches, recipe=Fp8(), group=world)
    wrong = {"tokens_T": TOKENS, "positions": TOKENS[0, :2]}
    with pytest.raises(ValueError, match="positions"):
        calibrate(model, [wrong if world.rank else BATCHES[1]], recipe=Fp8(), group=world)


def _hooks(module):
    return len(module._forward_hooks), len(module._forward_pre_hooks)


def _assert_close(one, other):
    for kind in ("inputs", "keys", "values"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        assert list(mine) == list(theirs), kind
        assert mine == pytest.approx(theirs, rel=2e-7), kind
        assert mine, kind
