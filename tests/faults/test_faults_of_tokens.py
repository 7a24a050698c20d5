"""Tokens: what the engine drew is what the learner trains on, and answers that are cut off are told of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drill import drill
from run_files import Trained, digits

from trtl_rl.engines.host import HostedEngine
from trtl_rl.rollout import Completion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_learner_gets_the_very_ids_that_the_engine_sent_padding_ids_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[tuple[int, ...], int] = {}
    poll = HostedEngine.poll
    pad = 0  # of the bundled tokenizer; nothing may take it for the end of an answer

    def with_pads(engine: HostedEngine, timeout: float) -> list[Completion]:
        done = [Completion(**{**vars(item), "ids": [pad, *item.ids[1:]]}) for item in poll(engine, timeout)]
        for item in done:
            sent[tuple(item.ids)] = sent.get(tuple(item.ids), 0) + 1
        return done

    monkeypatch.setattr(HostedEngine, "poll", with_pads)
    trained = Trained(monkeypatch)
    outcome = drill(tmp_path / "run", reward=digits)
    outcome.assert_done(3)
    ids = [completion.ids for groups in trained.groups for group in groups for completion in group.completions]
    assert len(ids) == 3 * 2 * 4 and all(tuple(item) in sent for item in ids)
    lengths = [len(item) for item in ids]
    means = [step["completions/mean_length"] for step in outcome.steps]
    assert sum(means) / 3 == pytest.approx(sum(lengths) / len(lengths), rel=1e-6)


def test_answers_that_are_nearly_all_cut_off_are_told_of_with_the_remedy(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"sampling": {"max_new_tokens": 4}}
    outcome = drill(tmp_path / "run", **keys)
    outcome.assert_done(3)
    assert any("were cut off at sampling.max_new_tokens=4" in text and "Try" in text for text in outcome.messages)
