"""The built-in reward ``judge``: ``rewards/judge.py`` with the embedded engine and a checkpoint of its own that nobody trains."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from trtl_rl.errors import UserError
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.model.architectures import check_architecture
from trtl_rl.model.source import find_model
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.rewards.judge import Judge, Seated

SLOTS = 64  # answers at the same time; a call asks about one group
CONTEXT = 4096  # tokens of question and answer, where nobody says how many
_BUCKET_BYTES = 2**26


class EngineJudge(Judge):
    """A :class:`Judge` on an engine in the process that calls it, which is one of its own unless ``in_process`` is set.

    Args:
        model: A directory, hub name or ``demo``, of the architectures that runs take.
        recipe: Its precision; default: the checkpoint's, rounded to BF16. ``fp8_block``: as rollouts.
        max_context: Tokens of the longest question and answer; default: what the model was made for, at most 4,096.
        cache_gib: Memory for keys and values.
        device: ``cpu`` or ``cuda``.
        compile: Compile the operators; default: where there is a compiler, and on the CPU.

    Raises:
        UserError: as :class:`Judge`; there is no such model, it is of another architecture, or the context does not fit it.
    """

    def __init__(
        self,
        model: str,
        template: str,
        pattern: str,
        values: Mapping[str, float] | None = None,
        no_verdict: float | None = None,
        system: str | None = None,
        max_new_tokens: int = 256,
        recipe: str = "none",
        max_context: int | None = None,
        cache_gib: float = 1.0,
        device: str = "cpu",
        compile: bool | None = None,
    ) -> None:
        super().__init__(template, pattern, values, no_verdict, system, max_new_tokens)
        source = find_model(model)
        check_architecture(SimpleNamespace(**source.config))
        Recipe.load(recipe)
        context = max_context or min(source.context, CONTEXT)
        if not max_new_tokens < context <= source.context:
            raise UserError(
                f"Reward 'judge': {context} tokens of context leave no room for a question beside "
                f"max_new_tokens={max_new_tokens}, or are more than the {source.context} that {model} was made for. "
                "Lower max_new_tokens, or set max_context."
            )
        self.model, self.recipe, self.context, self.cache_gib = model, recipe, context, cache_gib
        self.device, self.compile = device, compile

    def seat(self) -> Seated:
        """Load the checkpoint, quantise it once as the recipe says, and give it to an engine."""
        from trtl_rl.engines.torch_engine.engine import TorchEngine
        from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
        from trtl_rl.model.bind import describe, quantise_parameters
        from trtl_rl.model.kv import block_length, positions_within
        from trtl_rl.model.loading import load_tokenizer, read_model, stop_ids
        from trtl_rl.refit.sender import send

        path = find_model(self.model).path
        tokenizer, model = load_tokenizer(path), read_model(path)
        Recipe.load(self.recipe).apply(model)
        d, shape, stops = describe(model), ModelShape.from_model(model), stop_ids(path, model, tokenizer)
        positions = positions_within(self.cache_gib * 2**30, d, SLOTS, self.context)
        if positions < block_length(self.context):
            raise UserError(
                f"Reward 'judge': keys and values of {self.context} tokens do not fit into cache_gib={self.cache_gib:g}. "
                "Raise it, or lower max_context."
            )
        compiled = self.device == "cpu" and find_compiler() is not None if self.compile is None else self.compile
        tensors = quantise_parameters(dict(model.named_parameters()), d)
        del model
        engine = TorchEngine(
            d,
            KernelSet(compiled, device=self.device),
            slots=SLOTS,
            context=self.context,
            stop_ids=stops,
            positions=positions,
        )
        send(engine, tensors, version=0, coverage=d.coverage.digest, bucket_bytes=_BUCKET_BYTES)
        return Seated(engine, tokenizer, shape, self.context)
