"""Triton kernels of the backward of Mamba-2's scan, beside ``scan_kernels``.

Dimensions: B rows, L tokens in c chunks of q, H heads in G groups, P features of a head, N
features of a state.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportCallIssue=false

import triton
import triton.language as tl

from megablocks_core.layers.kernels.sequences.scan_kernels import decay_between, place, tile


@triton.jit
def pass_back_kernel(
    gradients_cBHPN,
    inner_nBHc,
    dcarry_BHPN,
    dfinal_BHPN,
    states_cBHPN,
    dstates_cBHPN,
    passing_BHc,
    num_chunks,
    num_sequences,
    num_numbers,
    FURTHER: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Gradients of what chunks read from states become those of the states behind chunks.

    ``inner`` has the inner products of these with what is left of the states before the chunks,
    over this tile's numbers; ``dcarry`` is the gradient of the state before the first chunk.
    """
    sequence = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = numbers < num_numbers
    at = sequence * num_numbers + numbers
    by_tile = (tl.program_id(1).to(tl.int64) * num_sequences + sequence) * num_chunks
    gradient = tl.load(dfinal_BHPN + at, mask=inside, other=0.0).to(tl.float32)
    chunk = tl.full((), 0, tl.int64) + num_chunks
    for _ in range(num_chunks):
        chunk -= 1
        here = chunk * num_sequences * num_numbers + at
        state = tl.load(states_cBHPN + here, mask=inside, other=0.0)
        passing = tl.load(passing_BHc + sequence * num_chunks + chunk)
        tl.store(inner_nBHc + by_tile + chunk, passing * tl.sum(gradient * state, axis=0))
        reading = tl.load(gradients_cBHPN + here, mask=inside, other=0.0)
        if FURTHER:
            reading += tl.load(dstates_cBHPN + here, mask=inside, other=0.0)
        tl.store(gradients_cBHPN + here, gradient, mask=inside)
        gradient = passing * gradient + reading
    tl.store(dcarry_BHPN + at, gradient, mask=inside)


@triton.jit
def pairs_kernel(
    dmeets_BcGqq,
    rows_BHcttr,
    columns_BHcttr,
    meets_BcGqq,
    dy_BLHP,
    x_BLHP,
    dt_BHcq,
    high_BHcq,
    low_BHcq,
    document_cq,
    length,
    size,
    num_chunks,
    num_heads,
    num_groups,
    num_features,
    PARTED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Gradient of ``C_i B_j``, j <= i: of a group's heads the sum of ``E_ij dt_j dy_i x_j``.

    Of each head, that times ``C_i B_j`` is the gradient in the logarithm of ``E_ij``, j < i. On
    the diagonal ``rows`` has for each k of a tile the sum over j < k <= i; elsewhere ``rows`` and
    ``columns`` have the sums of a tile's rows and columns, of t by t tiles.
    """
    if tl.program_id(2) > tl.program_id(1):
        return
    at = tl.program_id(0).to(tl.int64)
    row, chunk, group = place(at, num_groups, num_chunks)
    one = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    other = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    start, left = row * length + chunk * size, length - chunk * size
    inside, there = (one < size) & (one < left), (other < size) & (other < left)
    stride = num_heads * num_features
    total = tl.zeros((ROWS, ROWS), tl.float32)
    cells = at * size * size + one[:, None] * size + other[None, :]
    known = inside[:, None] & there[None, :] & (one[:, None] > other[None, :])
    meets = tl.load(meets_BcGqq + cells, mask=known, other=0.0)
    earlier = tl.where(one[:, None] < one[None, :], 1.0, 0.0)
    for head in range(group * (num_heads // num_groups), (group + 1) * (num_heads // num_groups)):
        base = (start * num_heads + head) * num_features
        product = tl.zeros((ROWS, ROWS), tl.float32)
        for first in range(0, num_features, FEATURES):
            features = first + tl.arange(0, FEATURES)
            dy = tile(dy_BLHP + base, one, inside, stride, features, num_features)
            x = tile(x_BLHP + base, other, there, stride, features, num_features)
            product = tl.dot(dy, tl.trans(x), product, input_precision=PRECISION)
        by_chunk = ((row * num_heads + head) * num_chunks + chunk) * size
        high, low, document = high_BHcq + by_chunk, low_BHcq + by_chunk, document_cq + chunk * size
        decay = decay_between(high, low, document, one, inside, other, there, False, PARTED)
        dt = tl.load(dt_BHcq + by_chunk + other, mask=there, other=0.0)
        product *= decay * dt[None, :]
        total += product
        product *= meets
        by_tile = ((row * num_heads + head) * num_chunks + chunk) * tl.num_programs(1)
        by_tile = (by_tile + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
        to = by_tile * ROWS + tl.arange(0, ROWS)
        if tl.program_id(1) == tl.program_id(2):
            before = tl.dot(product, earlier, input_precision="ieee")
            across = tl.where(one[:, None] >= one[None, :], before, 0.0)
            tl.store(rows_BHcttr + to, tl.sum(across, axis=0))
        else:
            tl.store(rows_BHcttr + to, tl.sum(product, axis=1))
            tl.store(columns_BHcttr + to, tl.sum(product, axis=0))
    tl.store(dmeets_BcGqq + cells, total, mask=(one < size)[:, None] & (other < size)[None, :])


@triton.jit
def groups_kernel(
    result_BLGN,
    dmeets_BcGqq,
    other_BLGN,
    a_BLHP,
    weights_BHcq,
    states_cBHPN,
    length,
    size,
    num_chunks,
    num_rows,
    num_heads,
    num_groups,
    num_features,
    num_states,
    REVERSED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    STATES: tl.constexpr,
):
    """Gradient in C: the sum over j <= i of ``dmeets_ij other_j``, and over a group's heads of
    ``weights_i a_i^T states``. Reversed that in B: over j >= i of ``dmeets_ji other_j``, and the
    same.
    """
    at = tl.program_id(0).to(tl.int64)
    row, chunk, group = place(at, num_groups, num_chunks)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    states = tl.program_id(2) * STATES + tl.arange(0, STATES)
    start, left = row * length + chunk * size, length - chunk * size
    inside = (rows < size) & (rows < left)
    base = (start * num_groups + group) * num_states
    stride = num_groups * num_states
    total = tl.zeros((ROWS, STATES), tl.float32)
    begin, end = 0, (tl.program_id(1) + 1) * ROWS
    if REVERSED:
        begin, end = tl.program_id(1) * ROWS, size
    for first in range(begin, end, ROWS):
        columns = first + tl.arange(0, ROWS)
        there = (columns < size) & (columns < left)
        meeting = inside[:, None] & there[None, :]
        if REVERSED:
            meeting = meeting & (columns[None, :] >= rows[:, None])
            source = columns[None, :] * size + rows[:, None]
        else:
            meeting = meeting & (columns[None, :] <= rows[:, None])
            source = rows[:, None] * size + columns[None, :]
        matrix = tl.load(dmeets_BcGqq + at * size * size + source, mask=meeting, other=0.0)
        others = tile(other_BLGN + base, columns, there, stride, states, num_states)
        total = tl.dot(matrix, others, total, input_precision=PRECISION)
    for head in range(group * (num_heads // num_groups), (group + 1) * (num_heads // num_groups)):
        a = a_BLHP + (start * num_heads + head) * num_features
        state = (chunk * num_rows + row) * num_heads + head
        by_chunk = ((row * num_heads + head) * num_chunks + chunk) * size
        weights = tl.load(weights_BHcq + by_chunk + rows, mask=inside, other=0.0)
        for first in range(0, num_features, FEATURES):
            features = first + tl.arange(0, FEATURES)
            mine = tile(a, rows, inside, num_heads * num_features, features, num_features)
            some = tile(
                states_cBHPN + state * num_features * num_states,
                features,
                features < num_features,
                num_states,
                states,
                num_states,
            )
            total = tl.dot(mine * weights[:, None], some, total, input_precision=PRECISION)
    target = result_BLGN + base + rows[:, None] * stride + states[None, :]
    kept = inside[:, None] & (states < num_states)[None, :]
    tl.store(target, total.to(result_BLGN.dtype.element_ty), mask=kept)
