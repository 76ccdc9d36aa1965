"""Triton kernels for the training steps of a stack of networks.

With batches of up to 128, training is memory-bound: a step must read and write every weight and its
momentum once. So `update` fuses the weight gradient with the momentum step, and the gradient is
never stored. The first layer is usually the largest, and its next inputs are known:
`update_and_next` multiplies them by the new weights while those are in registers.

Activations and errors are stored in *panels*: 128 examples of one model, as (width, 128). With
examples contiguous, operands are already in the layout that tensor cores need, and every row is 256
bytes. A smaller batch pads its panel with columns of zero errors. Rows of weights have the stride
``stride``, which aligns tiles to cache lines.

A CUDA graph of a few steps is replayed throughout an epoch, so kernels read the batch number from a
counter on the device, ``clock``. A negative ``unit`` marks an idle network (its slot is empty, or
its epoch is over), and all its programs return immediately.

Arguments that vary between calls are not specialized on, so each kernel is compiled once per
architecture.

Products are float16, accumulated in float32. Float16 has TF32's mantissa (11 bits), and its smaller
range suffices because `pseudo_gradient` rescales the errors of each panel.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from pseudograd.loss.triton.eq5 import log_strength, margin_of, power_of, strength_of

PANEL = 128
_PANEL = tl.constexpr(PANEL)

# The largest error of a panel is scaled to about 2^4. That leaves float16 a headroom of 2^12 for
# layers that amplify errors, and a range of 2^28 below.
_EXPONENT = tl.constexpr(4.0)


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
    """Return the derivative of the activation, given its output."""
    if activation == "relu":
        slope = tl.where(h > 0, 1.0, 0.0)
    elif activation == "sigmoid":
        slope = h * (1 - h)
    else:
        slope = 1 - h * h
    return slope


@triton.jit
def _rows(panels, panel, rows, width: tl.constexpr):
    """Load some rows (features or units) of a panel."""
    at = (panel * width + rows)[:, None] * _PANEL + tl.arange(0, _PANEL)[None, :]
    return tl.load(panels + at, mask=(rows < width)[:, None], other=0.0)


@triton.jit
def _note_squares(numbers, squares, apart: tl.constexpr, model, part):
    """Store a partial sum of ‖inputs‖² or ‖errors‖² of a layer, unless ``squares`` is None."""
    if squares is not None:
        numbers = numbers.to(tl.float32)
        tl.store(squares + model * apart + part, tl.sum(numbers * numbers))


@triton.jit
def _finish_layer(
    total, bias, bias_stride, out, squares, apart: tl.constexpr,
    model, panel, part, units, outputs: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    """Store activation(total + bias) for some units of a panel."""
    inside = units < outputs
    total += tl.load(bias + model * bias_stride + units, mask=inside, other=0.0)[:, None]
    at = (panel * outputs + units)[:, None] * _PANEL + tl.arange(0, _PANEL)[None, :]
    h = _activate(total, activation).to(out.dtype.element_ty)
    tl.store(out + at, h, mask=inside[:, None])
    _note_squares(tl.where(inside[:, None], h, 0.0), squares, apart, model, part)


@triton.jit
def _finish_errors(errors, out, pulls, pulls_stride, squares, apart: tl.constexpr,
                   model, part, units, width: tl.constexpr):  # fmt: skip
    """Store the errors of some units of a panel, and their sums, the gradients of the biases."""
    inside = units < width
    at = (model * width + units)[:, None] * _PANEL + tl.arange(0, _PANEL)[None, :]
    errors = tl.where(inside[:, None], errors, 0.0).to(tl.float16)
    tl.store(out + at, errors, mask=inside[:, None])
    pull = tl.sum(errors.to(tl.float32), 1)
    tl.store(pulls + model * pulls_stride + units, pull, mask=inside)
    _note_squares(errors, squares, apart, model, part)


@triton.jit
def _step(parameter, velocity, gradient, unit, rate, momentum):
    """Return the parameter and velocity after a step of classical momentum."""
    velocity = momentum * velocity + unit * gradient
    return parameter - rate * velocity, velocity


@triton.jit(
    do_not_specialize=["ahead", "size", "limit", "tiles"],
    do_not_specialize_on_alignment=["squares"],
)
def gather(
    features, order, unit, clock, ahead, size, limit, out, squares, apart: tl.constexpr,
    factor, offset, tiles, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Gather batch number ``clock + ahead`` of ``order`` (models, limit), scaled, into panels.

    A batch has up to ``size`` examples, in ``tiles`` panels per model.
    """
    panel = tl.program_id(1).to(tl.int64)
    model, tile = panel // tiles, panel % tiles
    start = (tl.load(clock) + ahead) * size
    if (tl.load(unit + model) < 0) | (start >= limit):
        return
    rows = tl.program_id(0) * block + tl.arange(0, block)
    column = tile * _PANEL + tl.arange(0, _PANEL)
    filled, inside = column < tl.minimum(size, limit - start), rows < width
    at = model * limit + start + column
    example = tl.load(order + at, mask=filled, other=0).to(tl.int64)
    at = example[:, None] * width + rows[None, :]
    mask = filled[:, None] & inside[None, :]
    x = tl.load(features + at, mask=mask, other=0).to(tl.float32) * factor + offset
    x = tl.where(mask, x, 0.0).to(tl.float16)
    _note_squares(x, squares, apart, model, tl.program_id(0))
    at = (panel * width + rows)[:, None] * _PANEL + tl.arange(0, _PANEL)[None, :]
    tl.store(out + at, tl.trans(x), mask=inside[:, None])


@triton.jit(
    do_not_specialize=["bias_stride", "tiles"],
    do_not_specialize_on_alignment=["bias", "squares"],
)
def layer(
    x, weight, bias, bias_stride, unit, out, squares, apart: tl.constexpr, tiles,
    width: tl.constexpr, outputs: tl.constexpr, stride: tl.constexpr, activation: tl.constexpr,
    block_out: tl.constexpr, block_in: tl.constexpr,
):  # fmt: skip
    """Compute out = activation(weightᵀ x + bias)."""
    panel = tl.program_id(1).to(tl.int64)
    model = panel // tiles
    if tl.load(unit + model) < 0:
        return
    units = tl.program_id(0) * block_out + tl.arange(0, block_out)
    inside = units < outputs
    weight += model * width * stride
    total = tl.zeros((block_out, _PANEL), tl.float32)
    for start in range(0, width, block_in):
        inner = start + tl.arange(0, block_in)
        mask = (inner < width)[:, None] & inside[None, :]
        w = tl.load(weight + inner[:, None] * stride + units[None, :], mask=mask, other=0.0)
        total = tl.dot(tl.trans(w), _rows(x, panel, inner, width), total)
    _finish_layer(
        total, bias, bias_stride, out, squares, apart,
        model, panel, tl.program_id(0), units, outputs, activation,
    )  # fmt: skip


@triton.jit
def _logits(logits, panel, example, labels, classes: tl.constexpr, block: tl.constexpr):
    """Return a panel's logits at the labels, the label mask, the other logits, and their maximum.

    The maximum is subtracted from the other logits.
    """
    classes_at = tl.arange(0, block)
    at = (panel * classes + classes_at)[:, None] * _PANEL + tl.arange(0, _PANEL)[None, :]
    z = tl.load(logits + at, mask=(classes_at < classes)[:, None], other=float("-inf"))
    on_label = classes_at[:, None] == tl.load(labels + example)[None, :]
    z_y = tl.sum(tl.where(on_label, z, 0.0), 0)
    others = tl.where(on_label, float("-inf"), z)
    top = tl.max(others, 0)
    return z_y, on_label, others - top[None, :], top


@triton.jit(
    do_not_specialize=["ahead", "size", "limit", "pulls_stride"],
    do_not_specialize_on_alignment=["pulls", "squares"],
)
def pseudo_gradient(
    logits, order, unit, clock, ahead, size, limit, labels, k, delta, pulls, pulls_stride, squares,
    apart: tl.constexpr, classes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Compute Eq. 5 at the logits of batch number ``clock + ahead``, scaled for float16.

    ``delta`` times ``unit`` is the pseudo-gradient of the batch's mean. After the last batch,
    ``unit`` marks the networks as idle.
    """
    model = tl.program_id(0).to(tl.int64)
    start = (tl.load(clock) + ahead) * size
    if tl.load(unit + model) < 0:
        return
    if start >= limit:
        tl.store(unit + model, -1.0)
        return
    size = tl.minimum(size, limit - start)
    classes_at, column = tl.arange(0, block), tl.arange(0, _PANEL)
    filled = column < size
    example = tl.load(order + model * limit + start + column, mask=filled, other=0).to(tl.int64)
    z_y, on_label, others, top = _logits(logits, model, example, labels, classes, block)
    margin = margin_of(z_y, top, tl.sum(power_of(others, 1.0, "1"), 0))
    k = tl.load(k + model)
    strength = tl.where(filled, strength_of(margin, k), 0.0)
    power = power_of(others, k, "any")
    f = strength[None, :] * tl.where(on_label, -1.0, power / tl.sum(power, 0)[None, :])
    largest = tl.max(strength, 0)
    # Errors below the floor are negligible; without it, exp2 would overflow.
    exponent = tl.maximum(tl.floor(tl.log2(largest)), -100.0) - _EXPONENT
    f *= tl.exp2(-exponent)
    _finish_errors(f, delta, pulls, pulls_stride, squares, apart, model, 0, classes_at, classes)
    tl.store(unit + model, tl.exp2(exponent) / size)


@triton.jit(do_not_specialize=["ahead", "size", "limit", "tiles", "panels"])
def judge(
    logits, order, unit, clock, ahead, size, limit, labels, mistakes, values, tiles, panels,
    classes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Count the mistakes and sum the cross-entropies in each panel of batch ``clock + ahead``.

    Both outputs have one number for each of a model's ``panels``, so that a network's result does
    not depend on how many are evaluated together.
    """
    panel = tl.program_id(0).to(tl.int64)
    model = panel // tiles
    tile = (tl.load(clock) + ahead) * (size // _PANEL) + panel % tiles
    column = tile * _PANEL + tl.arange(0, _PANEL)
    filled = column < limit
    if (tl.load(unit + model) < 0) | (tile >= panels):
        return
    example = tl.load(order + model * limit + column, mask=filled, other=0).to(tl.int64)
    z_y, on_label, others, top = _logits(logits, panel, example, labels, classes, block)
    margin = margin_of(z_y, top, tl.sum(power_of(others, 1.0, "1"), 0))
    # As in PyTorch, an infinite logit at the label has no cross-entropy.
    value = tl.where(z_y == float("inf"), float("nan"), -log_strength(-margin))
    # Ties go to the first class, as in `torch.argmax`.
    ranks = tl.arange(0, block)[:, None]
    first = tl.min(tl.where(others == 0, ranks, block), 0)
    right = (z_y > top) | ((z_y == top) & (first > tl.sum(tl.where(on_label, ranks, 0), 0)))
    wrong = filled & ~(right & (tl.abs(value) < float("inf")))
    tl.store(mistakes + model * panels + tile, tl.sum(wrong.to(tl.float32), 0))
    tl.store(values + model * panels + tile, tl.sum(tl.where(filled, value, 0.0), 0))


@triton.jit(do_not_specialize=["pulls_stride"], do_not_specialize_on_alignment=["pulls", "squares"])
def errors_before(
    delta, weight, h, unit, out, pulls, pulls_stride, squares, apart: tl.constexpr,
    width: tl.constexpr, outputs: tl.constexpr, stride: tl.constexpr, activation: tl.constexpr,
    block_in: tl.constexpr, block_out: tl.constexpr,
):  # fmt: skip
    """Compute out = (weight delta) · slope(h), the errors of the layer below."""
    model = tl.program_id(1).to(tl.int64)
    if tl.load(unit + model) < 0:
        return
    units = tl.program_id(0) * block_in + tl.arange(0, block_in)
    inside = units < width
    weight += model * width * stride
    total = tl.zeros((block_in, _PANEL), tl.float32)
    for start in range(0, outputs, block_out):
        inner = start + tl.arange(0, block_out)
        mask = inside[:, None] & (inner < outputs)[None, :]
        w = tl.load(weight + units[:, None] * stride + inner[None, :], mask=mask, other=0.0)
        total = tl.dot(w, _rows(delta, model, inner, outputs), total)
    total *= _slope(_rows(h, model, units, width).to(tl.float32), activation)
    part = tl.program_id(0)
    _finish_errors(total, out, pulls, pulls_stride, squares, apart, model, part, units, width)


@triton.jit
def _is_small(unit, clip, squares, model, layers: tl.constexpr, parts: tl.constexpr):
    """Return whether an upper bound on the gradient's norm is below the clipping threshold.

    A layer's gradient is x deltaᵀ, and Σ delta for its bias, so its squared norm is at most
    (‖x‖² + the number of examples) · ‖delta‖².
    """
    at = tl.arange(0, layers)[:, None] * parts + tl.arange(0, parts)[None, :]
    squares += model * 2 * layers * parts
    of_x = tl.sum(tl.load(squares + at), 1)
    of_delta = tl.sum(tl.load(squares + layers * parts + at), 1)
    scale, clip = tl.load(unit + model), tl.load(clip + model)
    return tl.sum((of_x + _PANEL) * of_delta, 0) * scale * scale < 0.99 * clip * clip


@triton.jit(do_not_specialize=["models"])
def squared_norm(
    x, delta, unit, clip, squares, norms, models, layers: tl.constexpr, parts: tl.constexpr,
    width: tl.constexpr, outputs: tl.constexpr, part: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Compute a partial sum of ‖x deltaᵀ‖² + ‖Σ delta‖², the squared norm of a layer's gradient.

    With G_x and G_delta the Gram matrices of a panel's examples, it is the sum of the entries of
    (G_x + 1) · G_delta (elementwise); a program takes ``part`` of the rows that G_x sums over. Most
    steps skip it, because an upper bound on the norm is small enough.
    """
    model = tl.program_id(0).to(tl.int64)
    scale = tl.load(unit + model)
    if (scale < 0) | _is_small(unit, clip, squares, model, layers, parts):
        return
    begin = tl.program_id(1) * part
    of_x = tl.full((_PANEL, _PANEL), 0.0, tl.float32)
    if begin == 0:
        of_x += 1.0
    for start in range(begin, tl.minimum(begin + part, width), block):
        rows = _rows(x, model, start + tl.arange(0, block), width)
        of_x = tl.dot(tl.trans(rows), rows, of_x)
    of_delta = tl.zeros((_PANEL, _PANEL), tl.float32)
    for start in range(0, outputs, block):
        rows = _rows(delta, model, start + tl.arange(0, block), outputs)
        of_delta = tl.dot(tl.trans(rows), rows, of_delta)
    tl.store(norms + tl.program_id(1) * models + model, tl.sum(of_x * of_delta) * scale * scale)


@triton.jit(do_not_specialize=["models", "norm_parts"])
def clip_unit(
    unit, clip, squares, norms, models, norm_parts, layers: tl.constexpr, parts: tl.constexpr
):
    """Scale down the unit of the errors, and so the gradient, to the clipping threshold."""
    model = tl.program_id(0).to(tl.int64)
    scale = tl.load(unit + model)
    if (scale < 0) | _is_small(unit, clip, squares, model, layers, parts):
        return
    square = 0.0
    for part in range(norm_parts):
        square += tl.load(norms + part * models + model)
    # As in torch.nn.utils.clip_grad_norm_.
    factor = tl.minimum(tl.load(clip + model) / (tl.sqrt(square) + 1e-6), 1.0)
    tl.store(unit + model, scale * factor)


@triton.jit
def update(
    x, delta, unit, rate, momentum, weight, velocity, shadow,
    width: tl.constexpr, outputs: tl.constexpr, stride: tl.constexpr,
    block_in: tl.constexpr, block_out: tl.constexpr,
):  # fmt: skip
    """Compute velocity = momentum · velocity + x deltaᵀ and weight -= rate · velocity.

    ``shadow`` is the float16 copy of the weight, for the next forward and backward pass.
    """
    model = tl.program_id(2).to(tl.int64)
    scale = tl.load(unit + model)
    if scale < 0:
        return
    # Consecutive programs take consecutive columns, so together they read whole rows.
    units = tl.program_id(0) * block_out + tl.arange(0, block_out)
    inner = tl.program_id(1) * block_in + tl.arange(0, block_in)
    errors = _rows(delta, model, units, outputs)
    gradient = tl.dot(_rows(x, model, inner, width), tl.trans(errors))
    # Load the weights only now: earlier, they would take registers and lower the occupancy.
    mask = (inner < width)[:, None] & (units < outputs)[None, :]
    at = model * width * stride + inner[:, None] * stride + units[None, :]
    mu = tl.load(momentum + model)
    # Without momentum there is no velocity to read or write.
    moving = mask & (tl.full((block_in, block_out), mu, tl.float32) > 0)
    v = tl.load(velocity + at, mask=moving, other=0.0)
    w = tl.load(weight + at, mask=mask, other=0.0)
    w, v = _step(w, v, gradient, scale, tl.load(rate + model), mu)
    tl.store(velocity + at, v, mask=moving)
    tl.store(weight + at, w, mask=mask)
    tl.store(shadow + at, w.to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["bias_stride"], do_not_specialize_on_alignment=["bias", "squares"])
def update_and_next(
    x, following, delta, unit, rate, momentum, weight, velocity, bias, bias_stride, out,
    squares, apart: tl.constexpr,
    width: tl.constexpr, outputs: tl.constexpr, stride: tl.constexpr, activation: tl.constexpr,
    block_in: tl.constexpr, block_out: tl.constexpr,
):  # fmt: skip
    """Run `update`, then `layer` for the next batch: out = activation(weightᵀ following + bias).

    A program goes through all weights of its units, tile by tile, so no float16 copy is stored. The
    bias must be updated first.
    """
    model = tl.program_id(1).to(tl.int64)
    scale = tl.load(unit + model)
    if scale < 0:
        return
    units = tl.program_id(0) * block_out + tl.arange(0, block_out)
    inside = units < outputs
    errors = _rows(delta, model, units, outputs)
    mu, eta = tl.load(momentum + model), tl.load(rate + model)
    # Without momentum there is no velocity to read or write.
    moving = inside & (tl.full((block_out,), mu, tl.float32) > 0)
    weight += model * width * stride
    velocity += model * width * stride
    total = tl.zeros((block_out, _PANEL), tl.float32)
    # Here num_stages prefetches every load; as a launch option it covers only the dot operands.
    for start in tl.range(0, width, block_in, num_stages=3):
        inner = start + tl.arange(0, block_in)
        present = (inner < width)[:, None]
        at = inner[:, None] * stride + units[None, :]
        v = tl.load(velocity + at, mask=present & moving[None, :], other=0.0)
        w = tl.load(weight + at, mask=present & inside[None, :], other=0.0)
        gradient = tl.dot(_rows(x, model, inner, width), tl.trans(errors))
        w, v = _step(w, v, gradient, scale, eta, mu)
        tl.store(velocity + at, v, mask=present & moving[None, :])
        tl.store(weight + at, w, mask=present & inside[None, :])
        total = tl.dot(tl.trans(w.to(tl.float16)), _rows(following, model, inner, width), total)
    _finish_layer(
        total, bias, bias_stride, out, squares, apart,
        model, model, tl.program_id(0), units, outputs, activation,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def update_biases(pulls, unit, rate, momentum, bias, velocity, count, block: tl.constexpr):
    """Run the momentum step for the biases of all layers, ``count`` per model."""
    model = tl.program_id(1).to(tl.int64)
    scale = tl.load(unit + model)
    if scale < 0:
        return
    units = tl.program_id(0) * block + tl.arange(0, block)
    at, inside = model * count + units, units < count
    own = scale, tl.load(rate + model), tl.load(momentum + model)
    v = tl.load(velocity + at, mask=inside, other=0.0)
    b = tl.load(bias + at, mask=inside, other=0.0)
    b, v = _step(b, v, tl.load(pulls + at, mask=inside, other=0.0), *own)
    tl.store(velocity + at, v, mask=inside)
    tl.store(bias + at, b, mask=inside)
