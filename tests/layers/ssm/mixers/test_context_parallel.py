"""Mixers whose sequences are cut over ranks equal one process, with heads cut or not."""

import random

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Mesh, gather_from
from megablocks_core.parallel import SequenceCut, reduce_gradients
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.layers.ssm.mixers.kinds import HIDDEN, KINDS, build, loss, tokens
from tests.traffic import Traffic

# A document begins at, before and behind the borders of pieces; some are empty.
DOCUMENTS = torch.tensor([0, 4, 4, 7, 8, 13, 14])
FEW_GROUPS = {
    "Mamba2": {"num_groups": 1, "bias": True},
    "GatedDeltaNet": {"num_key_heads": 2, "num_value_heads": 4},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
by_heads = pytest.mark.parametrize("kind", FEW_GROUPS)


@each_kind
@ranks(2, 4)
def test_pieces_equal_one_process(kind):
    cp = Mesh(cp=dist.get_world_size()).group("cp")
    for documents, cut_kind in ((DOCUMENTS, "zigzag"), (None, "contiguous")):
        _compare(kind, 15, cp=cp, documents=documents, cut_kind=cut_kind)


@by_heads
@ranks(2, 4)
def test_heads_in_exchange_for_tokens_equal_one_process(kind):
    cp = Mesh(cp=dist.get_world_size()).group("cp")
    for cut_kind, options in (("zigzag", FEW_GROUPS[kind]), ("contiguous", {})):
        for documents in (None, DOCUMENTS):
            _compare(
                kind,
                15,
                cp=cp,
                documents=documents,
                cut_kind=cut_kind,
                context="heads",
                **options,
            )


@pytest.mark.slow
@each_kind
@ranks(2, 4)
def test_every_cut_of_every_length_equals_one_process(kind):
    cp = Mesh(cp=dist.get_world_size()).group("cp")
    for length in (1, 3, 14, 16, 33):
        for cut_kind in ("contiguous", "zigzag"):
            for documents in (None, DOCUMENTS.clamp(max=length)):
                _compare(kind, length, cp=cp, documents=documents, cut_kind=cut_kind)


@pytest.mark.slow
@each_kind
@ranks(4, timeout=300)
def test_drawn_lengths_and_packings_equal_one_process(kind):
    """All ranks draw alike; hypothesis would make each rank shrink a failure by itself."""
    square, row, draw = Mesh(tp=2, cp=2), Mesh(cp=4), random.Random(0)
    cut_heads = {"tp": square.group("tp"), "group": square.group("tp", "cp")}
    for number in range(16):
        lengths = [draw.choice((0, 1, draw.randint(2, 12))) for _ in range(draw.randint(1, 6))]
        _compare(
            kind,
            sum(lengths) + draw.randint(0, 3) or 1,
            cp=row.group("cp") if number % 2 else square.group("cp"),
            documents=None if number % 8 == 0 else torch.tensor([0, *lengths]).cumsum(0),
            cut_kind=draw.choice(("contiguous", "zigzag")),
            **({} if number % 2 else cut_heads),
        )


@pytest.mark.slow
@each_kind
@ranks(2, timeout=300)
def test_twenty_packings_of_a_cut_row_compile_at_most_three_times(kind):
    torch._dynamo.reset()
    cp = Mesh(cp=2).group("cp")
    mixer = build(kind, cp=cp)

    def run(x_TH, length, sums):
        return mixer(x_TH, cut=SequenceCut(length, cu_seqlens=sums, group=cp))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    for number in range(20):
        length = 24 + number % 7
        sums = torch.tensor([0, number % 5, 7 + number % 9, 20])
        own = SequenceCut(length, group=cp).local_length
        x_TH = tokens(own, HIDDEN, dtype=torch.float32)
        y_TH = compiled(x_TH, length, sums)
        y_TH.sum().backward()
        assert_close(y_TH, run(x_TH, length, sums))
    assert counters["stats"]["unique_graphs"] - before <= 3


@each_kind
@ranks(4)
def test_pieces_and_heads_over_ranks_equal_one_process(kind):
    mesh = Mesh(tp=2, cp=2)
    options = {"num_groups": 1, "norm_groups": 1} if kind == "Mamba2" else {}
    by_heads = {} if kind == "Mamba1" else {"context": "heads"}
    for sequence_parallel, context in ((False, {}), (True, {}), (True, by_heads)):
        _compare(
            kind,
            16,
            cp=mesh.group("cp"),
            tp=mesh.group("tp"),
            group=mesh.group("tp", "cp"),
            documents=DOCUMENTS,
            sequence_parallel=sequence_parallel,
            **options,
            **context,
        )


@ranks(2)
def test_pads_in_a_cut_row_change_nothing():
    cp = Mesh(cp=2).group("cp")
    torch.manual_seed(0)
    whole = build("Mamba2").double()
    torch.manual_seed(0)
    mixer = build("Mamba2", cp=cp).double()
    x_TH = tokens(12, HIDDEN)
    sums = {
        "cu_seqlens": torch.tensor([0, 3, 7]),
        "cu_seqlens_padded": torch.tensor([0, 5, 10]),
    }
    cut = SequenceCut(12, cu_seqlens=sums["cu_seqlens_padded"], group=cp, kind="zigzag")
    y_TH = mixer(cut.shard(x_TH, 0), cut=cut, **sums)
    assert_close(cut.unshard(y_TH, 0), whole(x_TH, **sums))


@each_kind
@ranks(2)
def test_what_is_sent_does_not_grow_with_the_length(kind):
    cp = Mesh(cp=2).group("cp")
    mixer = build(kind, cp=cp).eval()
    seen = []
    for length in (64, 256):
        cut = SequenceCut(length, group=cp)
        with torch.no_grad(), Traffic() as traffic:
            mixer(tokens(cut.local_length, HIDDEN, dtype=torch.float32), cut=cut)
        seen.append(traffic.sorted_sizes())
    assert seen[0] == seen[1]
    assert {name: len(sizes) for name, sizes in seen[0].items()} == {
        "all_to_all": 1,
        "all_gather": 1,
    }


@ranks(2)
def test_traffic_is_that_of_the_page():
    cp = Mesh(cp=2).group("cp")
    heads, features, state, taps, length = 4, 2, 3, 4, 16
    states = {
        "all_to_all": [(taps - 1) * (heads * features + 2 * state)],
        "all_gather": [2 * (heads * (features * state + 1) + 1)],
    }
    tokens_for_heads = {
        "all_to_all": [
            length * heads * features,
            length * (heads * features + 2 * 2 * state + heads),
        ]
    }
    for context, forward, reverse in (
        (
            "states",
            states,
            {"all_to_all": states["all_to_all"], "reduce_scatter": states["all_gather"]},
        ),
        ("heads", tokens_for_heads, tokens_for_heads),
    ):
        mixer = build("Mamba2", num_groups=1, cp=cp, context=context)
        cut = SequenceCut(2 * length, group=cp)
        x_TH = tokens(length, HIDDEN, dtype=torch.float32).requires_grad_()
        with Traffic() as traffic:
            y_TH = mixer(x_TH, cut=cut)
        assert traffic.sorted_sizes() == forward
        with Traffic() as traffic:
            y_TH.sum().backward()
        assert traffic.sorted_sizes() == reverse


def _compare(
    kind,
    length,
    *,
    cp,
    tp=LOCAL,
    group=None,
    documents=None,
    cut_kind="contiguous",
    sequence_parallel=False,
    context=None,
    **options,
):
    cut = SequenceCut(length, cu_seqlens=documents, group=cp, kind=cut_kind)

    def made(group):
        if group.size == 1:
            return _Row(build(kind, recurrent=True, **options), documents)
        layout = {"tp": tp, "cp": cp, "sequence_parallel": sequence_parallel}
        layout |= {} if context is None else {"context": context}
        return _Pieces(build(kind, **layout, **options), cut)

    def own(inputs):
        (x_TH,) = inputs
        x_TH = cut.by_rank(x_TH, 0).split(cut.local_lengths)[cp.rank]
        return (x_TH.chunk(tp.size)[tp.rank] if sequence_parallel else x_TH,)

    def whole(y_TH):
        if sequence_parallel:
            y_TH = gather_from(y_TH, dim=0, group=tp)
        return cut.unshard(y_TH, 0)

    assert_parallel_equivalence(
        made,
        (tokens(length, HIDDEN),),
        group=cp if group is None else group,
        loss=loss,
        split=own,
        join=whole,
        reduce=lambda module: reduce_gradients(module, group=cp, reduction="sum"),
    )


class _Row(torch.nn.Module):
    def __init__(self, mixer, documents):
        super().__init__()
        self.mixer, self.documents = mixer, documents

    def forward(self, x_TH):
        return self.mixer(x_TH, cu_seqlens=self.documents)


class _Pieces(torch.nn.Module):
    def __init__(self, mixer, cut):
        super().__init__()
        self.mixer, self.cut = mixer, cut

    def forward(self, x_TH):
        return self.mixer(x_TH, cut=self.cut)
