"""The loss in JAX: optax's cross-entropies with one more argument, k.

With L' the log-sum-exp of the logits other than z_y, the paper's Eq. 5 is exactly

    f_y = -A,   f_j = A · softmax(k z, over j ≠ y)_j,   A = exp(-k softplus(m)),   m = z_y - L'.

The same formula is in `pseudograd.rules.paper` (PyTorch), `loss/cpp` (C++) and
`pseudograd.loss.triton.eq5` (Triton). Those use float64 internally, which JAX usually lacks. Here
labels do not need it, and soft targets use it if ``jax_enable_x64`` is set.

Private functions take the classes on the last axis, and per-example numbers as columns (..., 1).
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from pseudograd.extras import needed_for
from pseudograd.rules.checks import GREATEST_K, LEAST_K

with needed_for("pseudograd.jax"):
    import jax
    import jax.numpy as jnp
    from jax import Array

__all__ = ["tunable_cross_entropy", "tunable_cross_entropy_with_integer_labels"]

ArrayLike: TypeAlias = Array | np.ndarray[Any, Any]
Sensitivity: TypeAlias = float | ArrayLike

# ln 2 in two parts: the first has few digits, so its products with small integers are exact.
_LN_2_HIGH, _LN_2_LOW = 0.693145751953125, 1.428606820309417e-06
_NUMBERS: tuple[type, ...] = (numbers.Real, np.number)
# Float32 holds multiples of 1/4096 exactly up to 4096.
_STEPS = 4096


def tunable_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int = -1,
    where: ArrayLike | None = None,
    *,
    k: Sensitivity = 1.0,
) -> Array:
    """Return the cross-entropy of each example, with the pseudo-gradient of Eq. 5 at the logits.

    The value equals that of `optax.softmax_cross_entropy` or, for class indices, of
    `optax.softmax_cross_entropy_with_integer_labels`, for every k. At k = 1 the gradient is
    cross-entropy's as well. Positional arguments are in optax's order; k is keyword-only. It works
    under `jit`, `vmap`, `grad` and on sharded arrays. Forward mode and second derivatives raise,
    because no function has the pseudo-gradient as its gradient.

    Args:
        logits: Scores, with the classes along ``axis``; any floating-point dtype. Half types are
            computed in float32 and rounded once.
        labels: Class indices, of the shape of ``logits`` without ``axis``; or class probabilities
            (floating-point numbers) of the shape of ``logits``, whose gradient is cross-entropy's,
            -log p. An index outside [0, C) gives NaN, since JAX cannot raise an error under `jit`.
        axis: The axis of the classes.
        where: A mask of booleans: one per example, or one per logit to exclude classes. A fully
            masked example has value 0 and gradient 0.
        k: The sensitivity to large errors, above 0. Below 1, hard and mislabelled examples count
            less; above 1, more. A number, or an array with one value per example; it may be traced,
            so changing it does not recompile. It has no gradient. A traced k out of bounds gives a
            gradient of NaN.

    Returns:
        The losses, of the shape of ``logits`` without ``axis``. Take the mean yourself.

    Example:
        >>> logits, labels = jnp.array([[2.0, 1.0, 0.0]]), jnp.array([0])
        >>> tunable_cross_entropy(logits, labels, k=0.5)
        Array([0.4076...], dtype=float32)
        >>> jax.grad(lambda z: tunable_cross_entropy(z, labels, k=0.5).mean())(logits).round(4)
        Array([[-0.5786,  0.3601,  0.2184]], dtype=float32)

    """
    z = _checked_logits(logits)
    axis = _checked_axis(axis, z)
    examples = z.shape[:axis] + z.shape[axis + 1 :]
    target = _checked_labels(labels, z, examples)
    soft = jnp.issubdtype(target.dtype, jnp.floating)
    dtype = jnp.promote_types(z.dtype, target.dtype) if soft else z.dtype
    sensitivity = _checked_k(k, examples, z)
    z = jnp.moveaxis(z, axis, -1)
    target = jnp.moveaxis(target, axis, -1) if soft else target
    included = None
    if where is not None:
        mask = _checked_where(where, z, examples, axis)
        included = mask.any(-1)
        z = jnp.where(included[..., None], jnp.where(mask, z, -jnp.inf), 0)
        target = jnp.where(mask if soft else included, target, 0)
    value = (_soft_loss if soft else _label_loss)(z, target, sensitivity)
    return (value if included is None else jnp.where(included, value, 0)).astype(dtype)


def tunable_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int = -1,
    where: ArrayLike | None = None,
    *,
    k: Sensitivity = 1.0,
) -> Array:
    """Return `tunable_cross_entropy` for class indices; raise for class probabilities.

    Args:
        logits: Scores, with the classes along ``axis``.
        labels: Class indices, of the shape of ``logits`` without ``axis``.
        axis: The axis of the classes.
        where: A mask of booleans: one per example, or one per logit.
        k: The sensitivity to large errors, above 0: a number, or one per example.

    Returns:
        The losses, of the shape of ``logits`` without ``axis``.

    Example:
        >>> logits, labels = jnp.array([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]), jnp.array([0, -1])
        >>> tunable_cross_entropy_with_integer_labels(logits, labels, k=0.5, where=labels >= 0)
        Array([0.4076..., 0.       ], dtype=float32)

    """
    _check_array("labels", labels, "class indices")
    if jnp.issubdtype(labels.dtype, jnp.floating):
        raise TypeError(
            f"labels must hold class indices, not {labels.dtype}; for class probabilities use "
            "tunable_cross_entropy"
        )
    return tunable_cross_entropy(logits, labels, axis, where, k=k)


# --- both passes ----------------------------------------------------------------------------------


def _refusing(error: Exception) -> Callable[[Array], Array]:
    """Return the identity function, with a derivative that raises."""

    @jax.custom_jvp
    def same(x: Array) -> Array:
        return x

    @same.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        raise error

    return same


_constant = _refusing(ValueError("the loss has no gradient for k; use jax.lax.stop_gradient(k)"))
_differentiated_once = _refusing(
    TypeError(
        "pseudograd: a second derivative of a tunable loss does not exist: its backward pass is a "
        "pseudo-gradient, which is not the gradient of any function (Lemma 1 of the paper); use "
        "optax.softmax_cross_entropy where you need one"
    )
)


# The forward passes below call the loss itself, not its implementation: in nested derivatives JAX
# differentiates the forward pass, which would silently give cross-entropy's gradient. They save
# only their inputs.


@jax.custom_vjp
def _label_loss(logits: Array, y: Array, k: Array) -> Array:
    """Return -log p_y of each example."""
    _, margin = _top_and_margin(_in_working_precision(logits), y[..., None])
    return _softplus(-margin)[..., 0]


def _label_forward(logits: Array, y: Array, k: Array) -> Any:
    return _label_loss(logits, y, k), (logits, y, k)


def _label_backward(kept: Any, upstream: Array) -> Any:
    logits, y, k = kept
    z = _in_working_precision(_differentiated_once(logits))
    f = _eq5(z, y[..., None], k[..., None])
    return _times(upstream, f).astype(logits.dtype), None, None


_label_loss.defvjp(_label_forward, _label_backward)


@jax.custom_vjp
def _soft_loss(logits: Array, q: Array, k: Array) -> Array:
    """Return -Σ q log p of each example, where 0 · log 0 is 0."""
    log_p = _log_softmax(_wide(logits))
    value = -jnp.where(q == 0, 0, _wide(q) * log_p).sum(-1)
    return value.astype(_working_dtype(jnp.promote_types(logits.dtype, q.dtype)))


def _soft_forward(logits: Array, q: Array, k: Array) -> Any:
    return _soft_loss(logits, q, k), (logits, q, k)


def _soft_backward(kept: Any, upstream: Array) -> Any:
    logits, q, k = kept
    z = _wide(_differentiated_once(logits))
    f = _soft_rule(z, _wide(_differentiated_once(q)), k[..., None])
    at_logits, at_q = _times(upstream, f), _times(upstream, -_log_softmax(z))
    return at_logits.astype(logits.dtype), at_q.astype(q.dtype), None


_soft_loss.defvjp(_soft_forward, _soft_backward)


def _times(upstream: Array, f: Array) -> Array:
    """Return f times the upstream gradient; 0 where that is 0, even if f is NaN."""
    factor = upstream[..., None]
    return jnp.where(factor == 0, 0, factor * f)


# --- Eq. 5 ----------------------------------------------------------------------------------------


def _eq5(z: Array, y: Array, k: Array) -> Array:
    """Return the pseudo-gradient for labels."""
    top, margin = _top_and_margin(z, y)
    strength = jnp.exp(-k * _softplus(margin))
    # Subtract the top before multiplying by k, so that large logits keep their differences.
    power = jnp.where(_is_label(z, y), 0, jnp.exp(k * (z - top)))
    share = power / jnp.maximum(power.sum(-1, keepdims=True), 1)
    return jnp.where(_is_label(z, y), -strength, strength * share)


def _top_and_margin(z: Array, y: Array) -> tuple[Array, Array]:
    """Return the largest logit z_j with j ≠ y, and the margin z_y - L'.

    Cross-entropy is softplus(-margin) and 1 - p_y is exp(-softplus(margin)), neither with any
    cancellation. The margin itself is a difference of large numbers, and k multiplies its rounding
    error, so rounding errors are tracked explicitly.
    """
    is_label, lowest = _is_label(z, y), jnp.finfo(z.dtype).min
    # The lowest finite number, not -inf: if no other class is left (C = 1, or all others are -inf),
    # the difference to the top is then -inf and not -inf + inf.
    top = jnp.where(is_label, lowest, z).max(-1, keepdims=True)
    total, rest = _total(jnp.where(is_label, 0, jnp.exp(z - top)))
    z_y = jnp.take_along_axis(z, y, -1, mode="clip")
    # Undefined, as in optax: z_y is +inf, all logits are -inf, or the label is invalid.
    undefined = (z_y == jnp.inf) | ((z_y == -jnp.inf) & (total == 0))
    undefined |= (y < 0) | (y >= z.shape[-1])
    # Without other classes the top is the lowest finite number, and z_y may be that number too.
    z_y = jnp.where((total == 0) & jnp.isfinite(z_y), 0, z_y)
    difference, lost = _difference(z_y, top)
    n, log_total = _logarithm(jnp.maximum(total, 1))
    margin = (difference - n * _LN_2_HIGH) - log_total
    margin += lost - n * _LN_2_LOW - rest / jnp.maximum(total, 1)
    return top, jnp.where(undefined, jnp.nan, margin)


def _is_label(z: Array, y: Array) -> Array:
    return jax.lax.broadcasted_iota(y.dtype, z.shape, z.ndim - 1) == y


def _softplus(x: Array) -> Array:
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _total(x: Array) -> tuple[Array, Array]:
    """Return the sum of numbers in [0, 1], and its rounding error."""
    coarse = jnp.floor(x * _STEPS) / _STEPS
    exact, rest = coarse.sum(-1, keepdims=True), (x - coarse).sum(-1, keepdims=True)
    total = exact + rest
    return total, rest - (total - exact)


def _difference(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a - b and its rounding error."""
    difference = a - b
    back = difference - a
    lost = (a - (difference - back)) - (b + back)
    return difference, jnp.where(jnp.isfinite(difference), lost, 0)


def _logarithm(x: Array) -> tuple[Array, Array]:
    """Return n and log(x) - n ln 2, which is small."""
    fraction, n = jnp.frexp(x)
    low = fraction < np.sqrt(0.5)
    return (n - low).astype(x.dtype), jnp.log1p(jnp.where(low, 2 * fraction, fraction) - 1)


# --- soft targets ---------------------------------------------------------------------------------


def _soft_rule(z: Array, q: Array, k: Array) -> Array:
    """Return the pseudo-gradient for soft targets: with ε = p - q and S the sum of all ε > 0,

    f_j = sign(ε_j) · S^k · |ε_j|^k / Σ_{i: sign ε_i = sign ε_j} |ε_i|^k.

    A target with the sum W ≠ 1 gives W · f(p - q / W).
    """
    total = q.sum(-1, keepdims=True)
    q = jnp.where(total == 0, 0, q / total)
    log_p = _log_softmax(z)
    bias = jnp.exp(log_p) - q
    # Logarithms survive where the bias itself is rounded away: off the target the bias is p, and
    # the one class of a one-hot target has its side of zero to itself. NaN must stay visible.
    unknown = jnp.isnan(bias)
    off, sole = q == 0, (q == 1) & ~unknown
    log_bias = jnp.where(off, log_p, jnp.where(sole, 0, jnp.log(jnp.abs(bias))))
    above, below = (bias > 0) | off | unknown, (bias < 0) | sole
    # If rounding leaves one side empty, the other must not push alone (Eq. 4).
    balanced = below.any(-1, keepdims=True)
    above_top, above_share = _share(log_bias, above, k)
    _, below_share = _share(log_bias, below, k)
    sizes = jnp.where(above, jnp.exp(log_bias - above_top), 0)
    log_strength = above_top + jnp.log(sizes.sum(-1, keepdims=True))
    # Rounding can put the strength above 1, which a large k would make infinite.
    rounding = jnp.finfo(z.dtype).eps ** 0.5
    log_strength = jnp.where(log_strength < rounding, jnp.minimum(log_strength, 0), log_strength)
    f = total * balanced * jnp.exp(k * log_strength) * (above_share - below_share)
    return jnp.where(total == 0, 0, f)  # no target, no push, whatever the logits are


def _share(log_bias: Array, side: Array, k: Array) -> tuple[Array, Array]:
    """Return the largest log|ε| on one side of zero, and softmax(k · log|ε|) there, 0 elsewhere."""
    lowest = jnp.finfo(log_bias.dtype).min
    log_bias = jnp.where(side, log_bias, lowest)
    top = jnp.maximum(log_bias.max(-1, keepdims=True), lowest)
    power = jnp.where(side, jnp.exp(k * (log_bias - top)), 0)
    return top, power / jnp.maximum(power.sum(-1, keepdims=True), 1)


def _log_softmax(z: Array) -> Array:
    """Return log p, accurate near 0 because the sum leaves out the largest logit."""
    difference = z - z.max(-1, keepdims=True)
    # Where the largest is +inf, the difference is NaN, which must stay visible.
    first = _is_label(z, z.argmax(-1, keepdims=True)) & (difference == 0)
    rest = jnp.where(first, 0, jnp.exp(difference)).sum(-1, keepdims=True)
    return difference - jnp.log1p(rest)


# --- dtypes ---------------------------------------------------------------------------------------


def _working_dtype(dtype: Any) -> Any:
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _in_working_precision(x: Array) -> Array:
    return x.astype(_working_dtype(x.dtype))


def _wide(x: Array) -> Array:
    """Return an array in float64, if JAX has it enabled, because p - q cancels."""
    return x.astype(jax.dtypes.canonicalize_dtype(np.float64))


# --- checks ---------------------------------------------------------------------------------------


def _check_array(name: str, value: object, what: str) -> None:
    if not isinstance(value, (Array, np.ndarray, np.generic)):
        raise TypeError(
            f"{name} must be an array of {what}, not {type(value).__name__}; use jnp.asarray"
        )


def _checked_logits(logits: ArrayLike) -> Array:
    _check_array("logits", logits, "floating-point numbers")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"logits must hold floating-point numbers, not {logits.dtype}; use .astype(jnp.float32)"
        )
    return jnp.asarray(logits)


def _checked_axis(axis: int, logits: Array) -> int:
    """Return the axis as a number of 0 or more."""
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        is_k = isinstance(axis, (float, Array, np.ndarray))
        advice = "; pass k by keyword, k=..." if is_k else ""
        raise TypeError(f"axis must be a whole number, not {axis!r}{advice}")
    if not -logits.ndim <= axis < logits.ndim:
        raise ValueError(f"axis {axis} does not exist in logits of shape {logits.shape}")
    if logits.shape[axis] == 0:
        raise ValueError(f"logits have no classes: their shape is {logits.shape}, axis is {axis}")
    return int(axis) % logits.ndim


def _checked_labels(labels: ArrayLike, logits: Array, examples: tuple[int, ...]) -> Array:
    _check_array("labels", labels, "class indices or probabilities")
    if jnp.issubdtype(labels.dtype, jnp.floating):
        if labels.shape != logits.shape:
            raise ValueError(
                "labels hold floating-point numbers, so they must be class probabilities of the "
                f"shape of logits, {logits.shape}, not {labels.shape}; for class indices use "
                ".astype(jnp.int32)"
            )
    elif not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must hold class indices or probabilities, not {labels.dtype}")
    elif labels.shape != examples:
        advice = "; for one-hot labels use .astype(jnp.float32)" * (labels.shape == logits.shape)
        raise ValueError(
            f"labels must hold class indices of shape {examples} for logits of shape "
            f"{logits.shape}, not {labels.shape}{advice}"
        )
    # A narrow type may not hold the indices of all classes.
    narrow = labels.dtype.itemsize < 4 and jnp.issubdtype(labels.dtype, jnp.integer)
    return jnp.asarray(labels, jnp.int32 if narrow else None)


def _checked_k(k: Sensitivity, examples: tuple[int, ...], logits: Array) -> Array:
    """Return k for each example, NaN where a traced k is out of bounds."""
    bounds = "finite and above 0 (2^-100 to 2^100)"
    if not isinstance(k, (Array, np.ndarray)):
        if isinstance(k, bool) or not isinstance(k, _NUMBERS):
            raise TypeError(f"k must be a number or an array, not {type(k).__name__}")
        if not LEAST_K <= float(k) <= GREATEST_K:
            raise ValueError(f"k must be {bounds}, not {k}")
    else:
        if not jnp.issubdtype(k.dtype, jnp.floating):
            raise TypeError(
                f"k must hold floating-point numbers, not {k.dtype}; use .astype(jnp.float32)"
            )
        if k.shape not in ((), examples):
            raise ValueError(
                f"k must be a number or have one value for each example, shape {examples}, not "
                f"{k.shape}"
            )
        if _is_on_host(k):
            values = np.asarray(k, dtype=np.float64)
            if not ((values >= LEAST_K) & (values <= GREATEST_K)).all():
                raise ValueError(f"k must be {bounds} for every example")
    sensitivity = _constant(jnp.asarray(k, _working_dtype(logits.dtype)))
    known = (sensitivity >= LEAST_K) & (sensitivity <= GREATEST_K)
    return jnp.broadcast_to(jnp.where(known, sensitivity, jnp.nan), examples)


def _is_on_host(k: ArrayLike) -> bool:
    """Return whether values can be read without a device sync."""
    if isinstance(k, jax.core.Tracer):
        return False
    if not isinstance(k, Array):
        return True
    return k.is_fully_addressable and all(device.platform == "cpu" for device in k.devices())


def _checked_where(where: ArrayLike, rows: Array, examples: tuple[int, ...], axis: int) -> Array:
    """Return the mask with the classes last, like ``rows``."""
    _check_array("where", where, "booleans")
    if where.dtype != np.bool_:
        raise TypeError(f"where must hold booleans, not {where.dtype}; use where != 0")
    mask = jnp.asarray(where)
    shape = (*examples[:axis], rows.shape[-1], *examples[axis:])
    if mask.shape == examples:
        return jnp.broadcast_to(mask[..., None], rows.shape)
    if mask.shape != shape:
        raise ValueError(
            f"where must have one value for each example, shape {examples}, or for each logit, "
            f"shape {shape}, not {mask.shape}"
        )
    return jnp.moveaxis(mask, axis, -1)
