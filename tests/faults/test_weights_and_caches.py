"""Weights and caches: a refit that hangs or dies midway, and a cache that serves answers of older weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from drill import drill
from run_files import checkpoints

from trtl_rl.engines.host import HostedEngine
from trtl_rl.errors import EngineError
from trtl_rl.refit.manifest import RefitResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_cache_of_older_weights_ends_the_run_with_its_name(tmp_path: Path) -> None:
    outcome = drill(tmp_path / "run", engine={"fault": "stale_prefix_cache:2"})
    outcome.assert_ended_with("only prompts that it had answered before differ", steps=2)
    assert outcome.restarts == 0


def test_a_refit_that_dies_midway_each_time_keeps_what_was_learned(tmp_path: Path) -> None:
    outcome = drill(tmp_path / "run", engine={"fault": "die_in_refit:2:always", "restarts": 1})
    outcome.assert_ended_with("status -9", steps=2)
    assert checkpoints(outcome.run_dir) == ["step-00000002"], "the update was done before the refit"


def test_an_update_that_never_arrives_is_found_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = HostedEngine.finish_refit
    calls: list[int] = []

    def nothing(engine: HostedEngine) -> RefitResult:
        result = finish(engine)
        calls.append(result.version)
        if calls.count(2) == 1 and result.version == 2:
            return RefitResult(**{**vars(result), "digest": "0" * 64})
        return result

    monkeypatch.setattr(HostedEngine, "finish_refit", nothing)
    outcome = drill(tmp_path / "run")
    outcome.assert_done(3)
    assert outcome.restarts == 1 and any("digest differs" in text for text in outcome.messages)


def test_a_failure_that_would_repeat_for_certain_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(engine: HostedEngine) -> RefitResult:
        raise EngineError("model.layers.1.mlp.down_proj gives NaN", repeats=True)

    finish = HostedEngine.finish_refit
    monkeypatch.setattr(
        HostedEngine, "finish_refit", lambda engine: finish(engine) if engine.version < 1 else refuses(engine)
    )
    outcome = drill(tmp_path / "run")
    outcome.assert_ended_with("model.layers.1.mlp.down_proj gives NaN", steps=2)
    assert outcome.restarts == 0 and not any("anew" in text for text in outcome.messages)
