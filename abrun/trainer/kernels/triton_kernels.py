"""Triton kernels over tiles of logits: softmax sums and gradients.

A tile is [BLOCK_TOKENS, BLOCK_ROWS] float32 logits. Either the kernel multiplies it on the tensor cores and
keeps it in registers (with ROUND it rounds to the operands' dtype, as a separate matmul would), or it reads
the tile from `logits`, the output of a matmul. A logit is z = outer * u, where u is the projection's output
or, with a softcap, tanh(inner * output). Maxima are of u, and only differences are scaled (see
head.ResolvedHead). Letters: n tokens, v rows of the weight, b blocks of rows.
"""

# Triton compiles these functions, so Python's type rules do not apply.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton import knobs

IS_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))  # the interpreter cannot multiply bfloat16
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
LOWEST_LOGIT = tl.constexpr(-1e30)  # as in head.py: finite, to avoid inf - inf


@triton.jit
def softmax_sums_kernel(
    hidden,  # descriptor [n, H]; unused where logits is given
    weight,  # descriptor [v, H]; unused where logits is given
    logits,  # [n, v] projection's output, or None
    maxima,  # out, float32 [b, n]: each block's largest u
    sums_exp,  # out, float32 [b, n]: sum of exp(y), where y = outer * (u - maximum)
    sums_exp_logit,  # out, float32 [b, n] or None: sum of exp(y) * y
    saved,  # out, descriptor [n, b * BLOCK_ROWS] or None: exp(y), for gradient_from_saved_kernel
    num_tokens,
    num_rows,
    hidden_size,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Compute each block's sums of exp(y) and exp(y) * y, with y relative to the block's own largest u.

    Blocks are independent, because log(sum exp(z)) = outer * m + log(sum exp(outer * (u - m))) for any m:
    merge_sums_kernel brings their sums to one maximum afterwards. exp(y) is computed as 2^(y * log2(e)).
    """
    num_tiles = tl.cdiv(num_tokens, BLOCK_TOKENS) * tl.cdiv(num_rows, BLOCK_ROWS)
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS):
        token, row = _tile_position(tile, num_tokens, num_rows, BLOCK_TOKENS, BLOCK_ROWS, GROUP)
        tokens, rows = token + tl.arange(0, BLOCK_TOKENS), row + tl.arange(0, BLOCK_ROWS)
        exists = tokens < num_tokens

        if logits is None:
            u = _multiply(
                hidden, weight, token, row, hidden_size, ROUND, BLOCK_TOKENS, BLOCK_ROWS, BLOCK_HIDDEN
            )
        else:
            u = _load_logits(logits, tokens, rows, num_tokens, num_rows)
        u = _make_finite(_apply_softcap(u, inner, SOFTCAP))
        if row + BLOCK_ROWS > num_rows:
            u = tl.where(rows[None, :] < num_rows, u, LOWEST_LOGIT)

        peak = tl.max(u, 1)
        u -= peak[:, None]
        exponential = tl.exp2(u * (outer * LOG2_E))
        place = (row // BLOCK_ROWS).to(tl.int64) * num_tokens + tokens
        tl.store(maxima + place, peak, mask=exists)
        tl.store(sums_exp + place, tl.sum(exponential, 1), mask=exists)
        if sums_exp_logit is not None:
            tl.store(sums_exp_logit + place, tl.sum(exponential * u, 1) * outer, mask=exists)
        if saved is not None:
            saved.store([token, row], exponential.to(saved.dtype))


@triton.jit
def target_logit_kernel(
    hidden,  # [n, H]
    weight,  # [v, H]
    logits,  # [n, v] projection's output, or None
    target,  # int64 [n]
    target_logit,  # out, float32 [n]: the target's u, written only if the target is among these rows
    num_tokens,
    num_rows,
    hidden_size,
    hidden_stride,
    row_stride,
    first_row,
    inner,
    SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    """Compute the target's logit with the tensor cores, to get the same number as softmax_sums_kernel.

    It is the diagonal of a matmul with the targets' rows. Selecting it in softmax_sums_kernel would make
    every tile a tenth slower.
    """
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    exists = tokens < num_tokens
    column = tl.load(target + tokens, mask=exists, other=-1) - first_row
    is_local = (column >= 0) & (column < num_rows)
    if logits is None:
        z = tl.zeros((BLOCK_TOKENS, BLOCK_TOKENS), tl.float32)
        for start in range(0, hidden_size, BLOCK_HIDDEN):
            k = start + tl.arange(0, BLOCK_HIDDEN)
            inside = (k < hidden_size)[None, :]
            lhs = hidden + tokens.to(tl.int64)[:, None] * hidden_stride + k[None, :]
            rhs = weight + column[:, None] * row_stride + k[None, :]
            lhs = tl.load(lhs, mask=exists[:, None] & inside, other=0.0)
            z = _dot(lhs, tl.load(rhs, mask=is_local[:, None] & inside, other=0.0).T, z)
        places = tl.arange(0, BLOCK_TOKENS)
        u = tl.sum(tl.where(places[:, None] == places[None, :], z, 0.0), 1)
        if ROUND:
            u = _round(u, hidden.dtype.element_ty)
    else:
        u = tl.load(logits + tokens.to(tl.int64) * num_rows + column, mask=is_local, other=0.0).to(tl.float32)
    tl.store(target_logit + tokens, _apply_softcap(u, inner, SOFTCAP), mask=is_local)


@triton.jit
def merge_sums_kernel(
    maxima,  # float32 [b, n]
    sums_exp,  # float32 [b, n]
    sums_exp_logit,  # float32 [b, n] or None
    maximum,  # in and out, float32 [n]: of the previous rows; then of these rows as well
    sum_exp,  # in and out, float32 [n]
    sum_exp_logit,  # in and out, float32 [n] or None
    num_tokens,
    num_blocks,
    outer,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):
    """Bring the blocks' sums to the largest maximum M, and add them to those of the previous rows.

    Let s and x be a block's sums of exp(y) and exp(y) * y, relative to its maximum m. Relative to M every y
    becomes y + drop, drop = outer * (m - M), so that

        sum of exp(y + drop) = exp(drop) * s
        sum of exp(y + drop) * (y + drop) = exp(drop) * (x + drop * s).

    No drop is above 0, so nothing overflows.
    """
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    exists = tokens < num_tokens
    m = tl.load(maximum + tokens, mask=exists, other=LOWEST_LOGIT)
    s = tl.load(sum_exp + tokens, mask=exists, other=0.0)
    x = tl.zeros_like(s)
    if sum_exp_logit is not None:
        x = tl.load(sum_exp_logit + tokens, mask=exists, other=0.0)
    for start in range(0, num_blocks, BLOCK_BLOCKS):
        blocks = start + tl.arange(0, BLOCK_BLOCKS)
        place = blocks.to(tl.int64)[:, None] * num_tokens + tokens[None, :]
        mask = (blocks < num_blocks)[:, None] & exists[None, :]
        block_m = tl.load(maxima + place, mask=mask, other=LOWEST_LOGIT)
        block_s = tl.load(sums_exp + place, mask=mask, other=0.0)
        raised = tl.maximum(m, tl.max(block_m, 0))
        # Differences from LOWEST_LOGIT stay finite, so that 0 times them is 0.
        drop = tl.maximum((m - raised) * outer, LOWEST_LOGIT)
        block_drop = tl.maximum((block_m - raised[None, :]) * outer, LOWEST_LOGIT)
        if sum_exp_logit is not None:
            block_x = tl.load(sums_exp_logit + place, mask=mask, other=0.0)
            x = (x + s * drop) * tl.exp(drop)
            x += tl.sum((block_x + block_s * block_drop) * tl.exp(block_drop), 0)
        s = s * tl.exp(drop) + tl.sum(block_s * tl.exp(block_drop), 0)
        m = raised
    tl.store(maximum + tokens, m, mask=exists)
    tl.store(sum_exp + tokens, s, mask=exists)
    if sum_exp_logit is not None:
        tl.store(sum_exp_logit + tokens, x, mask=exists)


@triton.jit
def gradient_kernel(
    hidden,  # descriptor [n, H]; unused where logits is given
    weight,  # descriptor [v, H]; unused where logits is given
    logits,  # [n, v] projection's output, or None
    maximum,  # float32 [n]: this and the next two as in head.LogitGradient
    constant,  # float32 [n]
    linear,  # float32 [n] or None
    gradient,  # out: descriptor [n, v] or, where logits is given, a pointer, which may be that of logits
    num_tokens,
    num_rows,
    hidden_size,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Recompute each tile's logits, and write d = -exp(y) * (constant + linear * y).

    With y = outer * (u - maximum), this is the gradient of the projection's output, derived at
    head.LogitGradient, for all rows but the target's, which gradient_at_target_kernel overwrites. With a
    softcap, u = tanh(inner * output) has the slope inner * (1 - u * u); the coefficients include the factor
    inner * outer.
    """
    num_tiles = tl.cdiv(num_tokens, BLOCK_TOKENS) * tl.cdiv(num_rows, BLOCK_ROWS)
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS):
        token, row = _tile_position(tile, num_tokens, num_rows, BLOCK_TOKENS, BLOCK_ROWS, GROUP)
        tokens, rows = token + tl.arange(0, BLOCK_TOKENS), row + tl.arange(0, BLOCK_ROWS)
        if logits is None:
            u = _multiply(
                hidden, weight, token, row, hidden_size, ROUND, BLOCK_TOKENS, BLOCK_ROWS, BLOCK_HIDDEN
            )
        else:
            u = _load_logits(logits, tokens, rows, num_tokens, num_rows)
        u = _apply_softcap(u, inner, SOFTCAP)

        exists = tokens < num_tokens
        m = tl.load(maximum + tokens, mask=exists, other=0.0)
        y = (u - m[:, None]) * (outer * LOG2_E)
        d = tl.exp2(y) * _gradient_factor(constant, linear, tokens, exists, y)
        if SOFTCAP:
            d *= 1.0 - u * u
        if logits is None:
            gradient.store([token, row], d.to(gradient.dtype))
        else:
            place = tokens.to(tl.int64)[:, None] * num_rows + rows[None, :]
            mask = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
            tl.store(gradient + place, d.to(gradient.dtype.element_ty), mask=mask)


@triton.jit
def gradient_from_saved_kernel(
    values,  # [n, v]: exp(outer * (u - its block's maximum)), which become the gradient
    maxima,  # float32 [b, n]
    maximum,  # float32 [n]: this and the next two as in head.LogitGradient
    constant,  # float32 [n]
    linear,  # float32 [n] or None
    num_tokens,
    num_rows,
    outer,
    SOFTCAP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Write the gradient of gradient_kernel from saved exponentials, without another matmul.

    Relative to its block's maximum b, a saved value is e = exp(outer * (u - b)). With drop = outer * (b -
    maximum), exp(y) = e * exp(drop) and y = log(e) + drop.
    """
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = tokens < num_tokens
    place = tokens.to(tl.int64)[:, None] * num_rows + rows[None, :]
    mask = exists[:, None] & (rows < num_rows)[None, :]
    block_exponential = tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
    block_maximum = tl.load(
        maxima + tl.program_id(0).to(tl.int64) * num_tokens + tokens, mask=exists, other=0.0
    )
    m = tl.load(maximum + tokens, mask=exists, other=0.0)
    drop = (block_maximum - m) * (outer * LOG2_E)  # 0 or less
    # A value that underflowed to 0 gets some finite logarithm, because its gradient is 0 times that.
    y = _log2(tl.maximum(block_exponential, 1e-37)) + drop[:, None]
    d = block_exponential * tl.exp2(drop)[:, None] * _gradient_factor(constant, linear, tokens, exists, y)
    if SOFTCAP:
        u = y / (outer * LOG2_E) + m[:, None]
        d *= 1.0 - u * u
    tl.store(values + place, d.to(values.dtype.element_ty), mask=mask)


@triton.jit
def gradient_at_target_kernel(
    gradient,  # in and out, [n, v]
    target,  # int64 [n]
    target_logit,  # float32 [n]: the target's y, as head.SoftmaxSums has it
    maximum,  # float32 [n]: this and the next three as in head.LogitGradient
    constant,  # float32 [n]
    linear,  # float32 [n] or None
    onehot,  # float32 [n]
    num_tokens,
    num_rows,
    row_stride,
    first_row,
    outer,
    SOFTCAP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Write the gradient at each token's target, whose onehot term cannot be added after rounding."""
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    exists = tokens < num_tokens
    column = tl.load(target + tokens, mask=exists, other=-1) - first_row
    y = tl.load(target_logit + tokens, mask=exists, other=0.0)
    factor = tl.load(constant + tokens, mask=exists, other=0.0)
    if linear is not None:
        factor += tl.load(linear + tokens, mask=exists, other=0.0) * _make_finite(y)
    d = tl.load(onehot + tokens, mask=exists, other=0.0) - tl.exp2(y * LOG2_E) * factor
    if SOFTCAP:
        u = y / outer + tl.load(maximum + tokens, mask=exists, other=0.0)
        d *= 1.0 - u * u
    place = gradient + tokens.to(tl.int64) * row_stride + column
    tl.store(place, d.to(gradient.dtype.element_ty), mask=exists & (column >= 0) & (column < num_rows))


@triton.jit
def scale_kernel(values, scale, num_values, BLOCK: tl.constexpr):
    """Multiply `values` in place by `scale` [], a tensor on the device; a scale of 1 skips all access."""
    factor = tl.load(scale)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_values, step):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(values + place, mask=place < num_values).to(tl.float32)
            tl.store(values + place, (value * factor).to(values.dtype.element_ty), mask=place < num_values)


@triton.jit
def _tile_position(tile, num_tokens, num_rows, BLOCK_TOKENS, BLOCK_ROWS, GROUP: tl.constexpr):
    """Return the first token and row of a tile.

    Tiles that run at the same time lie in a stripe of GROUP token blocks, so that both operands stay in
    cache.
    """
    num_token_blocks, num_row_blocks = tl.cdiv(num_tokens, BLOCK_TOKENS), tl.cdiv(num_rows, BLOCK_ROWS)
    first_block = tile // (GROUP * num_row_blocks) * GROUP
    height = tl.minimum(num_token_blocks - first_block, GROUP)
    place = tile % (GROUP * num_row_blocks)
    return (first_block + place % height) * BLOCK_TOKENS, place // height * BLOCK_ROWS


@triton.jit
def _multiply(
    hidden,
    weight,
    token,
    row,
    hidden_size,
    ROUND: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    z = tl.zeros((BLOCK_TOKENS, BLOCK_ROWS), tl.float32)
    for start in range(0, hidden_size, BLOCK_HIDDEN):
        z = _dot(hidden.load([token, start]), weight.load([row, start]).T, z)
    if ROUND:
        z = _round(z, hidden.dtype)
    return z


@triton.jit
def _round(z, DTYPE: tl.constexpr):
    """Round z to a 16-bit dtype, to nearest with ties to even, and return it as float32."""
    if IS_INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300 (the interpreter truncates)
        bits = z.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        z = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        z = z.to(DTYPE).to(tl.float32)
    return z


@triton.jit
def _dot(lhs, rhs, z):
    if IS_INTERPRETED:
        lhs, rhs = lhs.to(tl.float32), rhs.to(tl.float32)
    return tl.dot(lhs, rhs, z)


@triton.jit
def _load_logits(logits, tokens, rows, num_tokens, num_rows):
    place = tokens.to(tl.int64)[:, None] * num_rows + rows[None, :]
    mask = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    return tl.load(logits + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _apply_softcap(u, inner, SOFTCAP: tl.constexpr):
    """Return tanh(inner * u) with a softcap, else u."""
    if SOFTCAP:
        u = 1.0 - 2.0 / (tl.exp2(u * (2.0 * LOG2_E * inner)) + 1.0)
    return u


@triton.jit
def _make_finite(u):
    """Replace -inf by a finite number, since it is multiplied by its exp, 0. NaN stays NaN."""
    return tl.maximum(u, LOWEST_LOGIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _log2(x):
    """Approximate log2 in hardware, to 2^-22: thirty instructions fewer per logit than tl.log2."""
    if IS_INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _gradient_factor(constant, linear, tokens, exists, y):
    """Return -(constant + linear * ln(2) * y): y is in bits here, and in nats in head.LogitGradient."""
    factor = -tl.load(constant + tokens, mask=exists, other=0.0)[:, None]
    if linear is not None:
        factor -= tl.load(linear + tokens, mask=exists, other=0.0)[:, None] * LN_2 * _make_finite(y)
    return factor
