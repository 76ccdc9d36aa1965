"""The steps of training a stack of networks as Triton kernels; one program works for one model.

At batches of 128 training is bound by memory: each weight and its momentum must be read and written
once a step. The kernels do just that. `update` takes the product that is the weight gradient straight
into the momentum update, so that no gradient is ever written; `layer` and `update` gather and scale the
pixels of the first layer themselves, so that no batch is ever written either.

Products are of float16 numbers, summed in float32. Float16 has the mantissa of TF32 (11 bits), and the
little range it has is enough because `pseudo_gradient` scales each model's errors to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The errors of a batch are scaled so that the largest is about this: float16 reaches a factor of
# 2^12 above (layers may amplify errors), and 2^28 below.
_TARGET_EXPONENT = tl.constexpr(4.0)


@triton.jit
def _activate(x, activation: tl.constexpr):
    if activation == "relu":
        x = tl.maximum(x, 0.0)
    elif activation == "sigmoid":
        x = 1 / (1 + tl.exp(-x))
    elif activation == "tanh":
        x = 1 - 2 / (1 + tl.exp(2 * x))
    return x


@triton.jit
def _slope(h, activation: tl.constexpr):
    """The activation's derivative, from its value."""
    if activation == "relu":
        slope = tl.where(h > 0, 1.0, 0.0)
    elif activation == "sigmoid":
        slope = h * (1 - h)
    else:
        slope = 1 - h * h
    return slope


@triton.jit
def _inputs(x, rows, columns, row_ok, width: tl.constexpr, factor, offset, gathered: tl.constexpr):
    """A tile of a layer's inputs in float16: rows of activations, or of scaled features."""
    mask = row_ok[:, None] & (columns < width)[None, :]
    tile = tl.load(x + rows[:, None] * width + columns[None, :], mask=mask, other=0)
    if gathered:
        tile = tl.where(mask, tile.to(tl.float32) * factor + offset, 0.0)
    return tile.to(tl.float16)


@triton.jit
def _input_rows(order, order_stride, model, rows, row_ok, size, gathered: tl.constexpr):
    """Where a layer's inputs lie: examples in the data set, or rows of the model's activations."""
    if gathered:
        return tl.load(order + model * order_stride + rows, mask=row_ok, other=0).to(tl.int64)
    return model * size + rows


@triton.jit
def layer(
    x, order, order_stride, weight, bias, out, size, factor, offset,
    width: tl.constexpr, outputs: tl.constexpr, gathered: tl.constexpr, activation: tl.constexpr,
    block_rows: tl.constexpr, block_out: tl.constexpr, block_in: tl.constexpr,
):  # fmt: skip
    """out = activation(x @ weight + bias), for ``size`` rows of each model."""
    model = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    columns = tl.program_id(0) * block_out + tl.arange(0, block_out)
    row_ok, column_ok = rows < size, columns < outputs
    at = _input_rows(order, order_stride, model, rows, row_ok, size, gathered)
    weight += model * width * outputs
    total = tl.zeros((block_rows, block_out), tl.float32)
    for start in range(0, width, block_in):
        inner = start + tl.arange(0, block_in)
        x_tile = _inputs(x, at, inner, row_ok, width, factor, offset, gathered)
        mask = (inner < width)[:, None] & column_ok[None, :]
        w_tile = tl.load(weight + inner[:, None] * outputs + columns[None, :], mask=mask, other=0.0)
        total = tl.dot(x_tile, w_tile, total)
    total += tl.load(bias + model * outputs + columns, mask=column_ok, other=0.0)[None, :]
    total = _activate(total, activation)
    out += (model * size + rows)[:, None] * outputs + columns[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def pseudo_gradient(
    logits, order, order_stride, labels, k, delta, unit, size,
    classes: tl.constexpr, block_rows: tl.constexpr, block_classes: tl.constexpr,
):  # fmt: skip
    """Eq. 5 in log space at the logits of each model, in units that suit float16.

    ``delta`` times ``unit`` is the gradient of the batch's mean.
    """
    model = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, block_rows), tl.arange(0, block_classes)
    row_ok = rows < size
    mask = row_ok[:, None] & (columns < classes)[None, :]
    at = (model * size + rows)[:, None] * classes + columns[None, :]
    z = tl.load(logits + at, mask=mask, other=float("-inf"))
    example = tl.load(order + model * order_stride + rows, mask=row_ok, other=0).to(tl.int64)
    y = tl.load(labels + example, mask=row_ok, other=0)
    on_label = columns[None, :] == y[:, None]
    k = tl.load(k + model)
    others = tl.where(on_label, float("-inf"), z)
    top = tl.max(others, 1)
    others = others - tl.where(row_ok, top, 0.0)[:, None]
    z_y = tl.sum(tl.where(on_label & mask, z, 0.0), 1)
    margin = z_y - top - tl.log(tl.sum(tl.exp(others), 1))
    # -softplus(margin) = log(1 - p_y); for large margins the logarithm of 1 + exp(-margin) is 0.
    log_miss = -tl.maximum(margin, 0.0) - tl.log(1 + tl.exp(-tl.abs(margin)))
    strength = tl.where(row_ok, tl.exp(k * log_miss), 0.0)
    power = tl.exp(k * others)
    share = power / tl.sum(power, 1)[:, None]
    f = strength[:, None] * tl.where(on_label, -1.0, share)
    largest = tl.max(strength, 0)
    exponent = tl.where(largest > 0, tl.floor(tl.log2(largest)), 0.0) - _TARGET_EXPONENT
    f = f * tl.exp2(-exponent)
    tl.store(delta + at, tl.where(mask, f, 0.0).to(tl.float16), mask=mask)
    tl.store(unit + model, tl.exp2(exponent) / size)


@triton.jit
def errors_before(
    delta, weight, h, out, size,
    width: tl.constexpr, outputs: tl.constexpr, activation: tl.constexpr,
    block_rows: tl.constexpr, block_in: tl.constexpr, block_out: tl.constexpr,
):  # fmt: skip
    """out = (delta @ weightᵀ) · slope(h): the errors one layer further down."""
    model = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, block_rows)
    columns = tl.program_id(0) * block_in + tl.arange(0, block_in)
    row_ok, column_ok = rows < size, columns < width
    weight += model * width * outputs
    total = tl.zeros((block_rows, block_in), tl.float32)
    for start in range(0, outputs, block_out):
        inner = start + tl.arange(0, block_out)
        d_tile = _inputs(delta, model * size + rows, inner, row_ok, outputs, 1.0, 0.0, False)
        mask = column_ok[:, None] & (inner < outputs)[None, :]
        w_tile = tl.load(weight + columns[:, None] * outputs + inner[None, :], mask=mask, other=0.0)
        total = tl.dot(d_tile, tl.trans(w_tile), total)
    mask = row_ok[:, None] & column_ok[None, :]
    at = (model * size + rows)[:, None] * width + columns[None, :]
    slope = _slope(tl.load(h + at, mask=mask, other=0.0).to(tl.float32), activation)
    tl.store(out + at, (total * slope).to(tl.float16), mask=mask)


@triton.jit
def squared_norm(
    x, order, order_stride, delta, unit, norm, size, factor, offset,
    width: tl.constexpr, outputs: tl.constexpr, gathered: tl.constexpr,
    block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """‖xᵀ delta‖² + ‖Σ delta‖² of a layer, without either: the norm of the gradient from its factors.

    With G the matrices of inner products between the examples of the batch, it is Σ (G_x + 1) · G_delta.
    """
    model = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, block_rows)
    row_ok = rows < size
    at = _input_rows(order, order_stride, model, rows, row_ok, size, gathered)
    of_x = tl.full((block_rows, block_rows), 1.0, tl.float32)
    for start in range(0, width, block):
        tile = _inputs(x, at, start + tl.arange(0, block), row_ok, width, factor, offset, gathered)
        of_x = tl.dot(tile, tl.trans(tile), of_x)
    of_delta = tl.zeros((block_rows, block_rows), tl.float32)
    for start in range(0, outputs, block):
        columns = start + tl.arange(0, block)
        tile = _inputs(delta, model * size + rows, columns, row_ok, outputs, 1.0, 0.0, False)
        of_delta = tl.dot(tile, tl.trans(tile), of_delta)
    scale = tl.load(unit + model)
    tl.store(norm + model, tl.sum(of_x * of_delta) * scale * scale)


@triton.jit
def update(
    x, order, order_stride, delta, unit, norms, clip, rate, momentum,
    weight, velocity, shadow, bias, bias_velocity, size, factor, offset, models,
    width: tl.constexpr, outputs: tl.constexpr, gathered: tl.constexpr, layers: tl.constexpr,
    clipped: tl.constexpr, block_rows: tl.constexpr, block_in: tl.constexpr,
    block_out: tl.constexpr,
):  # fmt: skip
    """velocity = momentum · velocity + xᵀ delta;  weight -= rate · velocity; and so for the biases.

    ``shadow`` is the weight in float16, for the products of the next step.
    """
    model = tl.program_id(2).to(tl.int64)
    inner = tl.program_id(0) * block_in + tl.arange(0, block_in)
    columns = tl.program_id(1) * block_out + tl.arange(0, block_out)
    column_ok = columns < outputs
    tile_ok = (inner < width)[:, None] & column_ok[None, :]
    tile = model * width * outputs + inner[:, None] * outputs + columns[None, :]
    v = tl.load(velocity + tile, mask=tile_ok, other=0.0)
    w = tl.load(weight + tile, mask=tile_ok, other=0.0)

    rows = tl.arange(0, block_rows)
    row_ok = rows < size
    at = _input_rows(order, order_stride, model, rows, row_ok, size, gathered)
    x_tile = _inputs(x, at, inner, row_ok, width, factor, offset, gathered)
    d_tile = _inputs(delta, model * size + rows, columns, row_ok, outputs, 1.0, 0.0, False)
    gradient = tl.dot(tl.trans(x_tile), d_tile)

    scale = tl.load(unit + model)
    if clipped:
        squares = tl.load(norms + model)
        for other in tl.static_range(1, layers):
            squares += tl.load(norms + other * models + model)
        scale *= tl.minimum(tl.load(clip + model) / (tl.sqrt(squares) + 1e-6), 1.0)
    eta, mu = tl.load(rate + model), tl.load(momentum + model)
    v = mu * v + scale * gradient
    w -= eta * v
    tl.store(velocity + tile, v, mask=tile_ok)
    tl.store(weight + tile, w, mask=tile_ok)
    tl.store(shadow + tile, w.to(tl.float16), mask=tile_ok)
    if tl.program_id(0) == 0:
        at_bias = model * outputs + columns
        v_bias = mu * tl.load(bias_velocity + at_bias, mask=column_ok, other=0.0)
        v_bias += scale * tl.sum(d_tile.to(tl.float32), 0)
        tl.store(bias_velocity + at_bias, v_bias, mask=column_ok)
        b = tl.load(bias + at_bias, mask=column_ok, other=0.0)
        tl.store(bias + at_bias, b - eta * v_bias, mask=column_ok)
