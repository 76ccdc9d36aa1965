"""The supplement's analysis: fixed points, the proof's claim, and the population's error."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize

from paper.theory import (
    bias_pull,
    cross_entropy,
    error_pct,
    fixed_point,
    pseudo_gradient,
)
from paper.toy import KS

ALPHAS = (0.55, 0.8, 0.95, 0.999)


def by_adaptive_quadrature(w: float, b: float, k: float, alpha: float) -> tuple[float, float]:
    """The definition of the pseudo-gradient, integrated by an independent routine."""

    def pull(x: float, sign: float) -> float:
        return -sign * math.exp(-k * float(np.logaddexp(0, sign * (w * x + b)))) / 2

    pieces = ((-1, 0, -1), (0, alpha, 1), (alpha, 1, -1))
    options = {"epsabs": 1e-13, "epsrel": 1e-12, "limit": 200}
    g_b = sum(quad(pull, low, high, (s,), **options)[0] for low, high, s in pieces)
    g_w = sum(
        quad(lambda x, s: x * pull(x, s), low, high, (s,), **options)[0] for low, high, s in pieces
    )
    return g_w, g_b


def test_integrals(subtests: pytest.Subtests) -> None:
    for k in (4.0, 1.0, 0.0625):
        for w, b in ((0, 0), (0, -1), (1.5, -0.2), (-3, 0.5), (60, -1.5)):
            with subtests.test(k=k, w=w, b=b):
                expected = by_adaptive_quadrature(w, b, k, 0.95)
                assert pseudo_gradient(w, b, k, 0.95) == pytest.approx(expected, abs=1e-11)


def test_the_fixed_point_has_zero_gradient(subtests: pytest.Subtests) -> None:
    for alpha in ALPHAS:
        for k in (1000.0, 16.0, *KS, 2.0**-12):
            with subtests.test(alpha=alpha, k=k):
                point = fixed_point(k, alpha)
                assert 0 < point.weight < math.inf
                assert point.threshold == -point.bias / point.weight
                # Relative to the pull of one undecided example (p = 1/2), 2^-k.
                scale = 0.5**k
                at_rest = pseudo_gradient(point.weight, point.bias, k, alpha)
                assert max(map(abs, at_rest)) < 1e-12 * scale + 1e-15
                # It is a minimum of a convex cost: a step in any direction is pushed back.
                for dw, db in ((1, 0), (-1, 0), (0, 1), (0, -1)):
                    w, b = point.weight * (1 + 0.1 * dw), point.bias + 0.1 * db / k
                    g_w, g_b = pseudo_gradient(w, b, k, alpha)
                    assert g_w * dw + g_b * db > 0


def test_at_k_1_it_minimises_the_cross_entropy() -> None:
    best = minimize(
        lambda p: cross_entropy(p[0], p[1]), [1.0, 0.0], method="BFGS", options={"gtol": 1e-9}
    )
    point = fixed_point(1.0)
    assert (point.weight, point.bias) == pytest.approx(tuple(best.x), abs=1e-4)
    assert point.cross_entropy == pytest.approx(best.fun, abs=1e-12)
    assert all(fixed_point(k).cross_entropy > point.cross_entropy for k in KS if k != 1)


def test_the_proofs_derivative_never_vanishes(subtests: pytest.Subtests) -> None:
    for alpha in ALPHAS:
        for w in (-20.0, -1.0, 0.0, 1e-6, 1.0, 20.0, 500.0):
            with subtests.test(alpha=alpha, w=w):
                assert bias_pull(w, 1.0, alpha) == pytest.approx((1 - alpha) / 2, rel=1e-12)
                step = 1e-4
                slope = (cross_entropy(w, step, alpha) - cross_entropy(w, -step, alpha)) / (
                    2 * step
                )
                assert slope == pytest.approx((1 - alpha) / 2, rel=1e-5)


def test_no_k_rests_at_threshold_0(subtests: pytest.Subtests) -> None:
    for k in (*KS, 1e-3):
        for w in (-3.0, 0.0, 1.0, 50.0):
            with subtests.test(k=k, w=w):
                assert bias_pull(w, k) > 0
                assert bias_pull(w, k) == pytest.approx(pseudo_gradient(w, 0.0, k)[1], rel=1e-9)


def test_threshold_and_error_rise_with_k_from_a_limit() -> None:
    points = [fixed_point(k) for k in sorted([2.0**-20, 2.0**-10, *KS, 100.0])]
    thresholds = [point.threshold for point in points]
    assert thresholds == sorted(thresholds)
    assert [p.error_pct for p in points] == sorted(p.error_pct for p in points)
    # As the module's docstring says of small k.
    assert thresholds[0] == pytest.approx(0.0261, abs=5e-5)
    assert thresholds[1] == pytest.approx(thresholds[0], abs=1e-5)
    assert points[0].weight * points[0].k == pytest.approx(6.40, abs=0.005)


def test_error_counts_examples_on_the_wrong_side(subtests: pytest.Subtests) -> None:
    for alpha in ALPHAS:
        with subtests.test(alpha=alpha):
            x = (np.arange(200_000) + 0.5) / 100_000 - 1
            positive = (x >= 0) & (x <= alpha)
            for threshold in (-2.0, -1.0, -0.3, 0.0, 0.05, alpha, 0.9995, 1.0, 3.0):
                counted = 100 * float(np.mean((x > threshold) != positive))
                assert error_pct(threshold, alpha) == pytest.approx(counted, abs=2e-3)
            assert error_pct(0.0, alpha) == pytest.approx(50 * (1 - alpha))
