"""Called by mkdocs: pictures of ``bench/results`` become assets of the site, so that they are kept once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add every picture of the benches as ``assets/NAME.png``."""
    from mkdocs.structure.files import File

    for picture in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"assets/{picture.name}", abs_src_path=str(picture)))
    return files
