"""An engine with one version of a trainer's weights, outside of a run: for ``Trainer.generate`` and ``Trainer.evaluate``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import UserError
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Ledger
from trtl_rl.metrics import MetricsWriter
from trtl_rl.model.loading import load_tokenizer, stop_ids
from trtl_rl.rollout import Request, Sampling
from trtl_rl.tasks.stream_task import make_task
from trtl_rl.trainer.binding import bind
from trtl_rl.trainer.engine_place import find_place, make_engines
from trtl_rl.trainer.engine_start import EngineStart
from trtl_rl.trainer.evaluate import evaluation_prompts, make_evaluator
from trtl_rl.trainer.loading import load_policy
from trtl_rl.trainer.rollouts import make_decode

if TYPE_CHECKING:
    from trtl_rl.trainer.trainer import Trainer


class Session:
    """Starts an engine and brings it to the weights of ``checkpoint``, or of the start model.

    Args:
        context: Tokens of the longest prompt and answer.
    """

    def __init__(self, trainer: Trainer, checkpoint: Path | None, context: int) -> None:
        import torch

        from trtl_rl.refit.shared_memory import VersionMemory

        c = self._config = trainer.config
        self._trainer, self.checkpoint, self.context = trainer, checkpoint, context
        self._stack = ExitStack()
        self._asked = 0
        try:
            scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            metrics = MetricsWriter(scratch / "metrics.jsonl")
            self._stack.callback(metrics.close)
            place = find_place(c, trainer.directory)
            self._engine = make_engines(c, place, scratch, metrics.message, trainer.engine)
            self._stack.callback(self._engine.close)
            torch.set_num_threads(c.threads)
            self._tokenizer = load_tokenizer(trainer.source.path)
            model = load_policy(trainer.source, trainer.recipe, checkpoint)
            decoder, kernels = bind(c, trainer.directory, metrics, model, context)
            decoder.memory = VersionMemory() if place.reads_in_place else None
            decoder.refresh(0)
            self._shape = ModelShape.from_model(model)
            stops = stop_ids(trainer.source.path, model, self._tokenizer)
            # An engine directory holds the start model's codes, not these.
            directory = trainer.directory if checkpoint is None or c.engine.backend != "torch" else None
            start = EngineStart(
                c, directory, decoder, kernels, context=context, stop_ids=stops, place=place, tell=metrics.message
            )
            self._engine.start(start, decoder.snapshot, 0)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """End the engine. Safe to call twice."""
        self._stack.close()

    def generate(
        self, prompts: Sequence[str | Sequence[Mapping[str, Any]]], samples: int, sampling: Sampling, seed: int
    ) -> list[list[str]]:
        """``samples`` answers to each prompt, as text. A list of messages goes through the chat template."""
        requests = []
        for i, prompt in enumerate(prompts):
            ids = self._ids(prompt)
            if len(ids) + sampling.max_new_tokens > self.context:
                raise UserError(
                    f"Prompt {i} has {len(ids)} tokens, and {sampling.max_new_tokens} new ones do not fit beside it into "
                    f"{self.context}. Give a larger max_context, or ask for fewer tokens."
                )
            self._asked += 1
            requests.append(Request(-self._asked, ids, samples, sampling, (seed, i, 0)))
        decode = make_decode(self._tokenizer)
        found: dict[int, list[tuple[int, str]]] = {request.id: [] for request in requests}
        for completion in self._engine.probe(requests):
            found[completion.request_id].append((completion.sample, decode(completion.ids)))
        return [[text for _, text in sorted(found[request.id])] for request in requests]

    def evaluate(self) -> dict[str, float]:
        """``eval/…`` metrics of the run's evaluation, see :class:`Evaluator`."""
        c, trainer = self._config, self._trainer
        room = trainer.prompt_room
        prompts = evaluation_prompts(
            c, trainer.evaluation_rows, lambda: make_task(trainer.rows, c, self._tokenizer, room), self._tokenizer, room
        )
        scorer = trainer.evaluation_scorer()
        try:
            scorer.wait_ready()
            nobody = Ledger(parameters=0, reward_system="none")
            decode = make_decode(self._tokenizer)
            evaluator = make_evaluator(c, scorer, prompts, self._engine, nobody, shape=self._shape, decode=decode)
            found = evaluator.run()
        finally:
            scorer.close()
        return {name: value for name, value in found.items() if not name.startswith("eval/version")}

    def _ids(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """As a task makes them: text as it stands, messages through the chat template."""
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt))
        messages: Any = list(prompt)
        text = str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        return list(self._tokenizer.encode(text, add_special_tokens=False))
