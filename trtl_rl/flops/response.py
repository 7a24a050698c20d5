"""The response of a score to the update fraction rho: four small models, how well each predicts, and which regime they name.

Constant, linear, log-linear and quadratic least squares, compared by their leave-one-out error (arXiv 2607.13389 fits a
quadratic beside the other three, and often finds the constant best). A few noisy cells always look like something, so a
shape is only believed if shuffled scores rarely look as good: a permutation test of the gain over the constant [D].
What comes out is a regime, not a point, and says nothing about held-out improvement by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Regime = Literal["high-update", "low-update", "undecided"]

LEVEL = 0.1  # of the permutation test: how often noise alone may be believed
AGREE = 0.8  # share of bootstrap fits that must have their optimum on the same side
RESAMPLES = 400
_SHUFFLES = 499
_GRID = 101

_TERMS: dict[str, Callable[[Array], list[Array]]] = {
    "constant": lambda rho: [np.ones_like(rho)],
    "linear": lambda rho: [np.ones_like(rho), rho],
    "log_linear": lambda rho: [np.ones_like(rho), np.log(rho)],
    "quadratic": lambda rho: [np.ones_like(rho), rho, rho**2],
}
MODELS = tuple(_TERMS)


@dataclass(frozen=True)
class Fit:
    """One model's least squares.

    Attributes:
        coefficients: Of its terms: 1, then rho or log rho, then rho².
        rmse: Root mean square of the residuals.
        loo: The same of the errors at each cell when it is left out; infinite where that cannot be fitted.
    """

    model: str
    coefficients: tuple[float, ...]
    rmse: float
    loo: float

    def at(self, rho: Array) -> Array:
        """The fitted score [n] at ``rho`` [n]."""
        fitted: Array = np.stack(_TERMS[self.model](rho), -1) @ np.array(self.coefficients)
        return fitted


@dataclass(frozen=True)
class Response:
    """What a set of cells says about one score.

    Attributes:
        rho, score: The cells [n].
        fits: Of all four models.
        best: The model with the least leave-one-out error.
        p_value: How often shuffled scores gain as much over the constant.
        regime: On which side of the middle of the range the best rho lies; ``undecided`` where the constant wins, the shape may
            be noise, or the bootstrap does not agree.
        reason: Why, in words.
        optimum, interval: The best rho of the shape, and the 95 % bootstrap interval under it and under the quadratic;
            ``None`` where no shape is believed.
        grid, curve, low, high: The best model over the range, and the 95 % bootstrap interval of its score.
    """

    rho: tuple[float, ...]
    score: tuple[float, ...]
    fits: dict[str, Fit]
    best: str
    p_value: float
    regime: Regime
    reason: str
    optimum: float | None
    interval: tuple[float, float] | None
    grid: tuple[float, ...]
    curve: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values; the curve is left out, since it follows from the fits."""
        fits = {
            name: {"coefficients": fit.coefficients, "rmse": fit.rmse, "leave_one_out": _finite(fit.loo)}
            for name, fit in self.fits.items()
        }
        return {
            "rho": self.rho,
            "score": self.score,
            "fits": fits,
            "best": self.best,
            "p_value": self.p_value,
            "regime": self.regime,
            "reason": self.reason,
            "optimum": self.optimum,
            "interval": self.interval,
        }


def fit_response(rho: Sequence[float], score: Sequence[float], seed: int = 0) -> Response:
    """Fit all models to cells ``(rho, score)`` [n], n at least 3, and name the regime.

    Args:
        rho: Update fractions in (0, 1].
        seed: Of shuffles and resampling.
    """
    x, y = np.array(rho, float), np.array(score, float)
    assert len(x) == len(y) >= 3 and bool((x > 0).all()) and bool(np.isfinite(y).all())
    rng = np.random.default_rng(seed)
    designs = {name: np.stack(terms(x), -1) for name, terms in _TERMS.items()}
    fits = {name: _fit(name, design, y) for name, design in designs.items()}
    best = min(MODELS, key=lambda name: fits[name].loo)  # of equals the simpler one
    p_value = _p_value(designs, y, rng)
    grid = np.linspace(x.min(), x.max(), _GRID)
    curves = _bootstrap(fits[best], designs[best], x, y, grid, rng)
    low, high = np.quantile(curves, (0.025, 0.975), axis=0)
    wide = curves if best == "quadratic" else _bootstrap(fits["quadratic"], designs["quadratic"], x, y, grid, rng)
    regime, reason, optimum, interval = _judge(fits[best], p_value, grid, curves, wide)
    return Response(
        tuple(x.tolist()),
        tuple(y.tolist()),
        fits,
        best,
        p_value,
        regime,
        reason,
        optimum,
        interval,
        tuple(grid.tolist()),
        tuple(fits[best].at(grid).tolist()),
        tuple(low.tolist()),
        tuple(high.tolist()),
    )


def _judge(
    fit: Fit, p_value: float, grid: Array, curves: Array, wide: Array
) -> tuple[Regime, str, float | None, tuple[float, float] | None]:
    if fit.model == "constant":
        return "undecided", "the constant predicts a left-out cell best", None, None
    if p_value > LEVEL:
        return "undecided", f"shuffled scores look as good in {p_value:.0%} of cases", None, None
    optimum = float(grid[int(fit.at(grid).argmax())])
    optima = grid[curves.argmax(1)]
    # A straight line has its best at an end, whatever the noise: the quadratic says how far from there it may lie.
    ends = [np.quantile(grid[some.argmax(1)], (0.025, 0.975)) for some in (curves, wide)]
    interval = float(min(low for low, _ in ends)), float(max(high for _, high in ends))
    middle = (grid[0] + grid[-1]) / 2
    above = float((optima > middle).mean())
    agree = max(above, 1 - above)
    if agree < AGREE:
        return "undecided", f"the optimum lies on one side in {agree:.0%} of the resampled fits", optimum, interval
    regime: Regime = "high-update" if above > 0.5 else "low-update"
    return regime, f"{fit.model} fit, {agree:.0%} of the resampled fits agree", optimum, interval


def _fit(name: str, design: Array, y: Array) -> Fit:
    coefficients = np.linalg.lstsq(design, y, rcond=None)[0]
    residuals = y - design @ coefficients
    return Fit(name, tuple(coefficients.tolist()), _rms(residuals), float(_loo(design, y[None])[0]))


def _loo(design: Array, y: Array) -> Array:
    """Leave-one-out RMSE [s] of scores ``y`` [s, n]: the residual over 1 - leverage, as is exact for least squares."""
    n, terms = design.shape
    if n <= terms or np.linalg.matrix_rank(design) < terms:
        return np.full(len(y), math.inf)
    hat = design @ np.linalg.pinv(design)
    free = 1 - np.diag(hat)
    if float(free.min()) < 1e-9:  # a cell that its model cannot do without
        return np.full(len(y), math.inf)
    errors: Array = np.sqrt((((y - y @ hat.T) / free) ** 2).mean(-1))
    return errors


def _p_value(designs: dict[str, Array], y: Array, rng: np.random.Generator) -> float:
    """Share of shuffles of the scores whose best shape gains as much over the constant as the scores do."""
    n = len(y)
    if math.factorial(n) <= _SHUFFLES + 1:
        shuffled = np.array(list(itertools.permutations(y)))  # the first is the scores themselves
    else:
        shuffled = np.stack([y, *(rng.permutation(y) for _ in range(_SHUFFLES))])
    constant = _loo(designs["constant"], shuffled)
    shapes = np.min([_loo(design, shuffled) for name, design in designs.items() if name != "constant"], axis=0)
    gain = np.divide(shapes, constant, out=np.full(len(shuffled), 1.0), where=constant > 0)
    return float((gain <= gain[0] * (1 + 1e-9)).mean())


def _bootstrap(fit: Fit, design: Array, x: Array, y: Array, grid: Array, rng: np.random.Generator) -> Array:
    """The model over ``grid``, refitted to resampled residuals [s, grid].

    They are enlarged for the leverage of their cell, and each resample by a factor that makes up for a spread estimated from so
    few of them: as Student's t is wider than the normal distribution.
    """
    fitted = fit.at(x)
    free = np.clip(1 - np.diag(design @ np.linalg.pinv(design)), 1e-6, None)
    residuals = (y - fitted) / np.sqrt(free)
    drawn = rng.choice(residuals - residuals.mean(), (RESAMPLES, len(y)))
    freedom = max(len(y) - design.shape[1], 1)
    drawn = drawn * np.sqrt(freedom / rng.chisquare(freedom, (RESAMPLES, 1)))
    coefficients = (fitted + drawn) @ np.linalg.pinv(design).T
    curves: Array = coefficients @ np.stack(_TERMS[fit.model](grid), -1).T
    return curves


def _rms(values: Array) -> float:
    return float(np.sqrt((values**2).mean()))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
