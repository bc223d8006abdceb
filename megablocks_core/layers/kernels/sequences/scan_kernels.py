"""Triton kernels of Mamba-2's scan in chunks (arXiv:2405.21060, section 6).

Everything is float32 in registers; ``PRECISION`` is how products of matrices round it: "ieee", or
"tf32" where all inputs have 16 bits, which tf32 holds exactly. Offsets are 64 bits wide.

Dimensions: B rows, L tokens in c chunks of q, H heads in G groups, P features of a head, N
features of a state.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportCallIssue=false

import triton
import triton.language as tl


@triton.jit
def tile(base, rows, inside, stride, columns, num_columns):
    """[rows columns] of a matrix in float32, zeros outside."""
    read = inside[:, None] & (columns < num_columns)[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=read, other=0.0).to(
        tl.float32
    )


@triton.jit
def place(at, num_inner, num_chunks):
    """(row, chunk, head or group) of a program, of which the last one is innermost."""
    return at // num_inner // num_chunks, at // num_inner % num_chunks, at % num_inner


@triton.jit
def decay_between(
    high,
    low,
    document,
    rows,
    inside,
    columns,
    there,
    REVERSED: tl.constexpr,
    PARTED: tl.constexpr,
):
    """exp(sums_row - sums_column) of columns up to the row; zeros where documents differ.

    Reversed it is that of the column less the row's, of columns from the row on.
    """
    sums = tl.load(high + rows, mask=inside, other=0.0)
    rest = tl.load(low + rows, mask=inside, other=0.0)
    sums_there = tl.load(high + columns, mask=there, other=0.0)
    rest_there = tl.load(low + columns, mask=there, other=0.0)
    log = (sums[:, None] - sums_there[None, :]) + (rest[:, None] - rest_there[None, :])
    meeting = inside[:, None] & there[None, :]
    if REVERSED:
        meeting, log = meeting & (columns[None, :] >= rows[:, None]), -log
    else:
        meeting = meeting & (columns[None, :] <= rows[:, None])
    if PARTED:
        mine = tl.load(document + rows, mask=inside, other=-1)
        theirs = tl.load(document + columns, mask=there, other=-1)
        meeting = meeting & (mine[:, None] == theirs[None, :])
    return tl.exp(tl.where(meeting, log, float("-inf")))


@triton.jit
def triangle(matrix, size, rows, inside, columns, there, REVERSED: tl.constexpr):
    """A tile of a chunk's matrix below its diagonal, or of the transposed one above it."""
    known = inside[:, None] & there[None, :]
    if REVERSED:
        source = matrix + columns[None, :] * size + rows[:, None]
        known = known & (columns[None, :] > rows[:, None])
    else:
        source = matrix + rows[:, None] * size + columns[None, :]
        known = known & (columns[None, :] < rows[:, None])
    return tl.load(source, mask=known, other=0.0)


@triton.jit
def products_kernel(
    meets_BcGqq,
    C_BLGN,
    B_BLGN,
    length,
    size,
    num_chunks,
    num_groups,
    num_states,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
):
    """``meets[i, j] = C_i B_j`` of tokens j <= i of a chunk; tiles above the diagonal stay."""
    if tl.program_id(2) > tl.program_id(1):
        return
    at = tl.program_id(0).to(tl.int64)
    row, chunk, group = place(at, num_groups, num_chunks)
    one = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    other = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    start = row * length + chunk * size
    left = length - chunk * size
    base = (start * num_groups + group) * num_states
    stride = num_groups * num_states
    meets = tl.zeros((ROWS, ROWS), tl.float32)
    for first in range(0, num_states, STATES):
        states = first + tl.arange(0, STATES)
        C = tile(C_BLGN + base, one, (one < size) & (one < left), stride, states, num_states)
        B = tile(B_BLGN + base, other, (other < size) & (other < left), stride, states, num_states)
        meets = tl.dot(C, tl.trans(B), meets, input_precision=PRECISION)
    target = meets_BcGqq + at * size * size + one[:, None] * size + other[None, :]
    tl.store(target, meets, mask=(one < size)[:, None] & (other < size)[None, :])


@triton.jit
def states_kernel(
    states_cBHPN,
    weights_BHcq,
    a_BLHP,
    b_BLGN,
    length,
    size,
    num_chunks,
    num_rows,
    num_heads,
    num_groups,
    num_features,
    num_states,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    STATES: tl.constexpr,
):
    """Of each chunk the sum over its tokens of ``weights[t] a[t] b[t]^T``."""
    at = tl.program_id(0).to(tl.int64)
    row, chunk, head = place(at, num_heads, num_chunks)
    group = head // (num_heads // num_groups)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    states = tl.program_id(2) * STATES + tl.arange(0, STATES)
    start, left = row * length + chunk * size, length - chunk * size
    a = a_BLHP + (start * num_heads + head) * num_features
    b = b_BLGN + (start * num_groups + group) * num_states
    weights = weights_BHcq + ((row * num_heads + head) * num_chunks + chunk) * size
    total = tl.zeros((FEATURES, STATES), tl.float32)
    for first in range(0, size, ROWS):
        tokens = first + tl.arange(0, ROWS)
        inside = (tokens < size) & (tokens < left)
        weight = tl.load(weights + tokens, mask=inside, other=0.0)
        some = tile(a, tokens, inside, num_heads * num_features, features, num_features)
        others = tile(b, tokens, inside, num_groups * num_states, states, num_states)
        weighed = tl.trans(some * weight[:, None])
        total = tl.dot(weighed, others, total, input_precision=PRECISION)
    target = (
        states_cBHPN + ((chunk * num_rows + row) * num_heads + head) * num_features * num_states
    )
    target = target + features[:, None] * num_states + states[None, :]
    tl.store(
        target, total, mask=(features < num_features)[:, None] & (states < num_states)[None, :]
    )


@triton.jit
def pass_kernel(
    states_cBHPN,
    passing_BHc,
    carry_BHPN,
    entries_cBHPN,
    num_chunks,
    num_sequences,
    num_numbers,
    CARRIED: tl.constexpr,
    ENTERED: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """What chunks add becomes the states before them, and behind the last one the last state.

    A sequence is a head of a row, a state ``num_numbers`` wide.
    """
    sequence = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = numbers < num_numbers
    at = sequence * num_numbers + numbers
    state = tl.zeros((NUMBERS,), tl.float32)
    if CARRIED:
        state = tl.load(carry_BHPN + at, mask=inside, other=0.0).to(tl.float32)
    for chunk in range(num_chunks):
        added = tl.load(states_cBHPN + at, mask=inside, other=0.0)
        if ENTERED:
            added += tl.load(entries_cBHPN + at, mask=inside, other=0.0)
            entries_cBHPN += num_sequences * num_numbers
        tl.store(states_cBHPN + at, state, mask=inside)
        state = tl.load(passing_BHc + sequence * num_chunks + chunk) * state + added
        states_cBHPN += num_sequences * num_numbers
    tl.store(states_cBHPN + at, state, mask=inside)


@triton.jit
def from_states(
    read,
    rows,
    inside,
    stride,
    state,
    features,
    num_features,
    num_states,
    PRECISION: tl.constexpr,
    STATES: tl.constexpr,
):
    """The products of rows [rows N] and a state [P N], of some of its features."""
    found = tl.zeros((rows.shape[0], features.shape[0]), tl.float32)
    for first in range(0, num_states, STATES):
        states = first + tl.arange(0, STATES)
        reading = tile(read, rows, inside, stride, states, num_states)
        some = tile(state, features, features < num_features, num_states, states, num_states)
        found = tl.dot(reading, tl.trans(some), found, input_precision=PRECISION)
    return found


@triton.jit
def own_factor(
    dt,
    meets,
    size,
    rows,
    inside,
    D_HP,
    head,
    features,
    num_features,
    SKIPPED: tl.constexpr,
    BY_FEATURE: tl.constexpr,
):
    """``(C_i B_i) dt_i + D``, by which a token's own x is multiplied."""
    factor = (dt * tl.load(meets + rows * size + rows, mask=inside, other=0.0))[:, None]
    if BY_FEATURE:
        D = D_HP + head * num_features + features
        factor = factor + tl.load(D, mask=features < num_features, other=0.0).to(tl.float32)
    elif SKIPPED:
        factor = factor + tl.load(D_HP + head).to(tl.float32)
    return factor


@triton.jit
def mix_kernel(
    result_BLHP,
    outside_pBHcq,
    whole_pBHcq,
    own_pBHcq,
    a_BLHP,
    other_BLHP,
    meets_BcGqq,
    states_cBHPN,
    read_BLGN,
    dt_BHcq,
    high_BHcq,
    low_BHcq,
    weights_BHcq,
    document_cq,
    D_HP,
    length,
    size,
    num_chunks,
    num_rows,
    num_heads,
    num_groups,
    num_features,
    num_states,
    REVERSED: tl.constexpr,
    WRITTEN: tl.constexpr,
    SUMMED: tl.constexpr,
    PARTED: tl.constexpr,
    SKIPPED: tl.constexpr,
    BY_FEATURE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    STATES: tl.constexpr,
):
    """What a token takes from earlier ones; ``REVERSED``, what later ones give back to it.

    With E_ij = exp(sums_i - sums_j), ``met_i`` is the sum over j < i of ``(C_i B_j) E_ij dt_j a_j``
    plus ``weights_i states read_i``. Reversed it is the sum over j > i of ``(C_j B_i) E_ji a_j``
    plus the same. Then

    - ``WRITTEN``: ``result = met + ((C_i B_i) dt_i + D) a``, met times dt_i if reversed;
    - ``SUMMED``: ``outside``, the inner product of ``other`` and what is from ``states``, over
      this tile's features; if also written ``whole``, that with ``met``, and ``own``, with ``a``.
    """
    at = tl.program_id(0).to(tl.int64)
    row, chunk, head = place(at, num_heads, num_chunks)
    group = head // (num_heads // num_groups)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    features = tl.program_id(2) * FEATURES + tl.arange(0, FEATURES)
    start = row * length + chunk * size
    left = tl.minimum(size, length - chunk * size)
    inside = rows < left
    by_chunk = ((row * num_heads + head) * num_chunks + chunk) * size
    a = a_BLHP + (start * num_heads + head) * num_features
    stride = num_heads * num_features
    meets = meets_BcGqq + ((row * num_chunks + chunk) * num_groups + group) * size * size
    state = states_cBHPN + ((chunk * num_rows + row) * num_heads + head) * num_features * num_states
    read = read_BLGN + (start * num_groups + group) * num_states
    met = from_states(
        read,
        rows,
        inside,
        num_groups * num_states,
        state,
        features,
        num_features,
        num_states,
        PRECISION,
        STATES,
    )
    met *= tl.load(weights_BHcq + by_chunk + rows, mask=inside, other=0.0)[:, None]

    to = by_chunk + tl.program_id(2).to(tl.int64) * num_rows * num_heads * num_chunks * size + rows
    other = other_BLHP + (start * num_heads + head) * num_features
    if SUMMED:
        others = tile(other, rows, inside, stride, features, num_features)
        tl.store(outside_pBHcq + to, tl.sum(met * others, axis=1), mask=rows < size)
    if WRITTEN:
        begin, end = 0, (tl.program_id(1) + 1) * ROWS
        if REVERSED:
            begin, end = tl.program_id(1) * ROWS, size
        high, low = high_BHcq + by_chunk, low_BHcq + by_chunk
        document = document_cq + chunk * size
        for first in range(begin, end, ROWS):
            columns = first + tl.arange(0, ROWS)
            there = columns < left
            matrix = triangle(meets, size, rows, inside, columns, there, REVERSED)
            matrix *= decay_between(
                high, low, document, rows, inside, columns, there, REVERSED, PARTED
            )
            if not REVERSED:
                matrix *= tl.load(dt_BHcq + by_chunk + columns, mask=there, other=0.0)[None, :]
            some = tile(a, columns, there, stride, features, num_features)
            met = tl.dot(matrix, some, met, input_precision=PRECISION)

        mine = tile(a, rows, inside, stride, features, num_features)
        if SUMMED:
            tl.store(whole_pBHcq + to, tl.sum(met * others, axis=1), mask=rows < size)
            tl.store(own_pBHcq + to, tl.sum(mine * others, axis=1), mask=rows < size)
        dt = tl.load(dt_BHcq + by_chunk + rows, mask=inside, other=0.0)
        factor = own_factor(
            dt, meets, size, rows, inside, D_HP, head, features, num_features, SKIPPED, BY_FEATURE
        )
        if REVERSED:
            met = met * dt[:, None]
        at = (start * num_heads + head) * num_features + rows[:, None] * stride
        target = result_BLHP + at + features[None, :]
        kept = inside[:, None] & (features < num_features)[None, :]
        met = (met + factor * mine).to(result_BLHP.dtype.element_ty)
        tl.store(target, met, mask=kept)
