"""The response curves of a race as a PNG: a row for each reward system, a column for each target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trtl_rl.flops.response import Response
from trtl_rl.trainer.race import CAUTION


def draw(responses: Mapping[str, Mapping[str, Response]], path: Path, title: str) -> None:
    """Cells, the best fit with its bootstrap interval, and the regime. A fit that is not believed is dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    targets = list(dict.fromkeys(name for found in responses.values() for name in found))
    size = (3.4 * len(targets) + 0.6, 2.9 * len(responses) + 1.0)
    figure, axes = pyplot.subplots(len(responses), len(targets), figsize=size, squeeze=False, layout="constrained")
    for row, (label, found) in zip(axes, responses.items(), strict=True):
        for axis, target in zip(row, targets, strict=True):
            if target not in found:
                axis.set_axis_off()
                continue
            response = found[target]
            believed = response.regime != "undecided"
            colour = "C0" if believed else "0.45"
            axis.fill_between(response.grid, response.low, response.high, color=colour, alpha=0.15, lw=0)
            axis.plot(response.grid, response.curve, color=colour, ls="-" if believed else "--", lw=1.5)
            axis.plot(response.rho, response.score, "o", color="C3", ms=5)
            if believed and response.interval is not None:
                axis.axvspan(*response.interval, color="C2", alpha=0.12, lw=0)
            axis.set_title(
                f"{label}: {target}\n{response.regime} ({response.best}, p {response.p_value:.2f})", fontsize=9
            )
            axis.grid(alpha=0.3)
            axis.tick_params(labelsize=8)
            axis.set_xlabel("update fraction ρ = learning / total", fontsize=8)
    legend = "Green: 95% interval of the best ρ. Dashed: a fit that may be noise."
    figure.suptitle(f"{title}. {legend}\n{CAUTION}", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
