"""Several engines: rollout throughput and refit time, measured on one machine; and a simulation on paper for 8 to 1,024 GPUs.

    python bench/scale.py rollouts      # slow engines, as processes and as Ray actors; minutes
    python bench/scale.py refits        # full and delta, by size, host and number of engines; needs about 8 GiB
    python bench/scale.py paper         # formulas only
    python bench/scale.py plot

Each writes its part of ``results/scale.json``, with the machine that it ran on. ``paper`` takes the host's cost for each byte
from the refits there.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from common import RESULTS, machine

PATH = RESULTS / "scale.json"
COLUMNS = ("gpus", "learners", "engines", "ranks", "rollout_s", "learn_s", "refit_s", "longest_s", "step_s", "bound")
SLOWER = 1.1  # a step that lasts this many times the one with the fastest refit: the refit is in the way


def read() -> dict[str, Any]:
    """All parts so far."""
    found: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {}
    return found


def keep(part: str, values: Mapping[str, Any]) -> None:
    """Write one part; lists of plain values take one line each."""
    text = json.dumps({**read(), part: {**machine(), **values}}, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    PATH.write_text(text + "\n")


def paper(done: Mapping[str, Any]) -> dict[str, Any]:
    """The simulation, with what it rests on; printed too."""
    import scale_paper

    assumptions = scale_paper.Assumptions()
    measured: set[str] = set()
    for row in done.get("refits", {"rows": []})["rows"]:
        if (row["model"], row["host"], row["replicas"]) == ("135 M", "ray", 1):
            # Digests, comparison and packing, and what the engine does with a bucket, are not told apart: all of it is `move`.
            costs = list(assumptions.store_host)
            costs[row["mode"] == "delta"] = row["least_move_ms"] / 1e3 / row["bytes"]
            assumptions = replace(assumptions, store_host=(costs[0], costs[1]))
            measured.add(row["mode"])
    about = scale_paper.described(assumptions)
    if measured == {"full", "delta"}:
        told = "bench/results/scale.json, refits: 135 M, one actor on one machine: `move` for each byte"
        about["sources"] = {**about["sources"], "store_host": told}
    print(json.dumps(about, indent=1))
    table = {}
    for key, rows in scale_paper.series(assumptions):
        table[" ".join(key)] = [
            [row.gpus, row.learners, row.engines, row.ranks]
            + [rounded(x) for x in (row.rollout, row.learn, row.refit, row.longest, row.step)]
            + [row.bound]
            for row in rows
        ]
        print(" ".join(key), *[f"\n    {row}" for row in table[" ".join(key)]], flush=True)
    return {**about, "columns": COLUMNS, "series": table, "in_the_way_from": in_the_way(table)}


def rounded(seconds: float) -> float:
    """Three digits."""
    return float(f"{seconds:.3g}")


def in_the_way(table: Mapping[str, list[list[Any]]]) -> dict[str, int | None]:
    """From which number of GPUs on a step lasts a tenth longer than with the fastest refit; None: never up to the largest."""
    found: dict[str, int | None] = {}
    for name, rows in table.items():
        start, _, path = name.rpartition(" ")
        if path == "broadcast_bound":
            continue
        best = {row[0]: row[-2] for row in table[f"{start} broadcast_bound"]}
        late = [row[0] for row in rows if row[-2] >= SLOWER * best[row[0]]]
        found[name] = min(late, default=None)
    return found


# --- the picture ---


def plot(done: Mapping[str, Any]) -> None:
    """``results/scale.png``: what was measured above, what was simulated below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7.4))
    _rollouts(axes[0][0], done["rollouts"])
    for axis, mode in zip(axes[0][1:], ("full", "delta"), strict=True):
        _refits(axis, done["refits"]["rows"], mode)
    for axis, model in zip(axes[1], ("Qwen3-8B", "Qwen3-32B"), strict=False):
        _steps(axis, done["paper"]["series"], model)
    _parts(axes[1][2], done["paper"]["series"]["H200 Qwen3-8B fp8 async store_delta"])
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / "scale.png", dpi=100)
    pyplot.close(figure)


def _rollouts(axis: Any, part: Mapping[str, Any]) -> None:
    for host in ("process", "ray"):
        rows = [row for row in part["rows"] if row["host"] == host]
        low = [row["tokens_per_second"] - row["min_max"][0] for row in rows]
        high = [row["min_max"][1] - row["tokens_per_second"] for row in rows]
        axis.errorbar(
            *_columns(rows, "replicas", "tokens_per_second"), yerr=[low, high], marker="o", capsize=3, label=host
        )
    first = part["rows"][0]["tokens_per_second"]
    axis.plot([1, 4], [first, 4 * first], ":", color="grey", label="in proportion")
    axis.set_title(f"measured: slow engines, {part['step_seconds']:g} s a step", fontsize=9)
    axis.set_xlabel("engines", fontsize=8)
    axis.set_ylabel("tokens a second", fontsize=8)


def _refits(axis: Any, rows: Iterable[Mapping[str, Any]], mode: str) -> None:
    for host, line in (("process", "-"), ("ray", "--")):
        for number, replicas in enumerate((1, 2, 4)):
            some = [row for row in rows if (row["host"], row["replicas"], row["mode"]) == (host, replicas, mode)]
            label = f"{host}, {replicas}"
            axis.plot(*_columns(some, "bytes", "least_ms"), line, marker="o", color=f"C{number}", ms=3, label=label)
    axis.set(xscale="log", yscale="log")
    axis.set_title(f"measured: refit, {mode}", fontsize=9)
    axis.set_xlabel("bytes of the version", fontsize=8)
    axis.set_ylabel("ms until all engines are live", fontsize=8)


def _steps(axis: Any, table: Mapping[str, list[list[Any]]], model: str) -> None:
    for mode, line in (("sync", "-"), ("async", "--")):
        paths = ("store_full", "store_delta", "broadcast_published")
        for number, (precision, path) in enumerate([("bf16", "store_full"), *[("fp8", path) for path in paths]]):
            rows = table[f"H200 {model} {precision} {mode} {path}"]
            label = f"{precision}, {path}, {mode}"
            axis.plot([row[0] for row in rows], [row[-2] for row in rows], line, color=f"C{number}", label=label)
    axis.set(xscale="log", yscale="log")
    axis.set_title(f"SIMULATED: seconds of a step, {model}, H200", fontsize=9)
    axis.set_xlabel("GPUs", fontsize=8)


def _parts(axis: Any, rows: list[list[Any]]) -> None:
    for name in ("rollout_s", "longest_s", "learn_s", "refit_s"):
        axis.plot([row[0] for row in rows], [row[COLUMNS.index(name)] for row in rows], marker="o", ms=3, label=name)
    axis.set(xscale="log", yscale="log")
    axis.set_title("SIMULATED: parts, Qwen3-8B, H200, fp8, store_delta, async", fontsize=9)
    axis.set_xlabel("GPUs", fontsize=8)


def _columns(rows: Iterable[Mapping[str, Any]], x: str, y: str) -> tuple[list[Any], list[Any]]:
    found = list(rows)
    return [row[x] for row in found], [row[y] for row in found]


def main() -> None:
    """Do one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("rollouts", "refits", "paper", "plot"))
    parser.add_argument("--repeats", type=int, default=3, help="turns of rollouts, or refits of each version")
    parser.add_argument("--go-on", action="store_true", help="refits: keep what the result file has, and do the rest")
    a = parser.parse_args()
    if a.part == "plot":
        plot(read())
        return
    if a.part == "paper":
        keep("paper", paper(read()))
        return
    import scale_measured
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    scale_measured.install()
    if a.part == "rollouts":
        scale_measured.rollouts(a.repeats, lambda found: keep(a.part, found))
    else:
        done = read().get("refits", {}).get("rows", []) if a.go_on else []
        scale_measured.refits(a.repeats, lambda found: keep(a.part, found), done)


if __name__ == "__main__":
    main()
