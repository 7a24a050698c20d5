"""Bind a Hugging Face model: it keeps parameters, names and ModelOpt's state; its forward goes to ours.

``TrainableDecoder.refresh`` rounds the FP32 masters to BF16 and quantises them, once per weight version; the same codes
and scales fill the learner's operands and travel to the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trtl_rl.kernels import autograd
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.kernels.spec import ROW_TILE, TOKEN_TILE
from trtl_rl.model.adapters import base_linear, masters, read_adapters, without_wrapper
from trtl_rl.model.architectures import check_architecture
from trtl_rl.model.description import LINEARS, DecoderDescription
from trtl_rl.model.finite import first_not_finite, is_finite
from trtl_rl.model.kv import Blocks, RopeTables, Rows
from trtl_rl.model.layer import Attend, decoder_layer
from trtl_rl.model.operand import Operand
from trtl_rl.model.weights import LORA_A, LORA_B, SCALE_SUFFIX, DecoderWeights, LayerWeights, TensorSpec, tensor_specs
from trtl_rl.recipe.codec import decode, encode
from trtl_rl.recipe.recipe import expand
from trtl_rl.refit.shared_memory import VersionMemory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def describe(model: PreTrainedModel) -> DecoderDescription:
    """Read sizes, rope, quantisers and adapters off a model."""
    config: Any = model.config
    check_architecture(config)
    rotary: Any = model.model.rotary_emb
    layer: Any = model.model.layers[0]
    modules = dict(zip(LINEARS, _linears(layer), strict=True))
    return DecoderDescription(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=modules["q_proj"].out_features // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab=model.lm_head.out_features,
        eps=config.rms_norm_eps,
        qk_norm=hasattr(layer.self_attn, "q_norm"),
        biases=tuple(role for role, module in modules.items() if module.bias is not None),
        tied=model.lm_head.weight is model.model.embed_tokens.weight,
        inverse_frequencies=tuple(rotary.inv_freq.float().tolist()),
        attention_scaling=float(rotary.attention_scaling),
        coverage=expand(model),
        adapters=read_adapters(model),
    )


def quantise_parameters(parameters: Mapping[str, Tensor], description: DecoderDescription) -> dict[str, Tensor]:
    """Every tensor of a version in the layout of ``tensor_specs``, see :func:`quantised`."""
    return dict(quantised(parameters, description))


def quantised(
    parameters: Mapping[str, Tensor], description: DecoderDescription, frozen: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Round masters to BF16 and quantise them: one tensor of a version after the other, in the layout of ``tensor_specs``.

    Args:
        parameters: Float32 masters by their checkpoint names.
        frozen: Tensors of an earlier version, which are not quantised again.

    Raises:
        FloatingPointError: a weight is not finite; names the tensor.
    """
    formats = {item.name: item.format.forward_weight for item in description.coverage.linears}
    for spec in _renewed(description, frozen):
        name = spec.name
        if name.endswith(SCALE_SUFFIX):
            continue
        rounded = parameters[name].detach().bfloat16()
        format = formats.get(name.rpartition(".")[0]) if spec.dtype == torch.float8_e4m3fn else None
        if not rounded.sum().isfinite() and not rounded.isfinite().all():  # the sum is 40 times faster
            raise FloatingPointError(f"{name} holds NaN or infinite values; it was not quantised.")
        if format is None:
            yield name, rounded
        else:
            codes, scale = encode(rounded.float(), format)
            yield name, codes
            yield name + SCALE_SUFFIX, scale


def _renewed(description: DecoderDescription, frozen: Mapping[str, Tensor] | None) -> list[TensorSpec]:
    """The tensors that a version does not take from an earlier one."""
    return [spec for spec in tensor_specs(description) if not frozen or spec.name not in frozen]


class TrainableDecoder:
    """The learner's side of a decoder: masters in the Hugging Face model, operands of one version in ``weights``.

    Args:
        model: float32, quantised by ``Recipe.apply``, then perhaps wrapped by ``peft`` with LoRA adapters. The ``forward`` of the
            Hugging Face model is replaced.
        kernels: With backward units.
        context: Longest sequence; rotary tables are made for it, on both sides.

    Attributes:
        gradient_checkpointing: Keep only each layer's input for backward, and compute the layer again there.
        snapshot: Every tensor of the version that was loaded last, in CPU memory.
        memory: Where versions are written, if engines on this machine read them there (only with a model on the CPU); None:
            anywhere.
    """

    def __init__(self, model: PreTrainedModel, kernels: KernelSet, context: int) -> None:
        model = without_wrapper(model)
        self.model = model
        self.description = describe(model)
        self.weights = DecoderWeights(self.description, kernels)
        d = self.description
        self.rope = RopeTables(d.inverse_frequencies, d.attention_scaling, context, kernels.device)
        self.context = context
        self.padding = model.model.embed_tokens.padding_idx
        self.parameters = masters(model)
        for layer in self.weights.layers:
            self._attach(layer)
        self.snapshot: dict[str, Tensor] = {}
        self.gradient_checkpointing = False
        self.memory: VersionMemory | None = None
        model.forward = self.forward

    @torch.no_grad()
    def refresh(self, version: int) -> dict[str, Tensor]:
        """Quantise the masters and load the result as ``version``; what adapters leave frozen is quantised the first time only.

        Returns:
            Every tensor of the version in the layout of ``tensor_specs``: what a refit sends.

        Raises:
            FloatingPointError: a weight is not finite; names the tensor.
            RuntimeError: quantisers or adapters of the model are not what they were when it was bound; names the linear.
        """
        changed = self.description.coverage.difference(expand(self.model))
        if changed:
            raise RuntimeError(f"The model's quantisers changed after it was bound; bind it again. {changed[0]}")
        if read_adapters(self.model) != self.description.adapters:
            raise RuntimeError("The model's adapters changed after it was bound; bind it again.")
        frozen: dict[str, Tensor] = {}
        if self.description.adapters:
            adapters = (LORA_A, LORA_B)
            frozen = {name: tensor for name, tensor in self.snapshot.items() if not name.endswith(adapters)}
        kept: dict[str, Tensor] = {}
        if self.memory is not None:
            kept = self.memory.take((s.name, s.dtype, s.shape) for s in _renewed(self.description, frozen))
        tensors = {
            name: kept[name].copy_(tensor) if kept else tensor
            for name, tensor in quantised(self.parameters, self.description, frozen)
        }
        self.load(tensors, version, frozen)
        return self.snapshot

    def load(self, tensors: dict[str, Tensor], version: int, frozen: Mapping[str, Tensor] | None = None) -> None:
        """Run ``tensors``, in the layout of ``tensor_specs``, as ``version``; the masters stay what they are.

        Args:
            frozen: Tensors of an earlier version that are loaded already and go on.
        """
        self.weights.load(tensors)
        self._load_gradient_operands(tensors)
        self.weights.version = version
        self.snapshot = {**(frozen or {}), **{name: tensor.cpu() for name, tensor in tensors.items()}}

    def _attach(self, layer: LayerWeights) -> None:
        """Give a layer its FP32 masters, in the order in which autograd returns their gradients."""
        prefix = f"model.layers.{layer.index}."

        def norm(name: str) -> Tensor:
            return self.parameters[f"{prefix}{name}.weight"]

        def of(operands: list[Operand]) -> list[Tensor]:
            out: list[Tensor] = []
            for operand in operands:
                kinds = [] if operand.spec.frozen else [".weight", *([".bias"] if operand.spec.bias else [])]
                out += [self.parameters[name + kind] for kind in kinds for name in operand.names]
                out += [self.parameters[name + kind] for kind in (LORA_A, LORA_B) for name in operand.ups]
            return out

        norms = [norm("self_attn.q_norm"), norm("self_attn.k_norm")] if layer.spec.qk_norm else []
        layer.before_parameters = [norm("input_layernorm"), *norms, *of(layer.qkv)]
        layer.after_parameters = [*of([layer.o]), norm("post_attention_layernorm"), *of([*layer.gate_up, layer.down])]

    def _load_gradient_operands(self, tensors: dict[str, Tensor]) -> None:
        """Where only the backward pass takes FP8 weights, give DGrad operands of its own."""
        for linear in self.description.coverage.linears:
            f = linear.format
            tied = linear.name == "lm_head" and self.description.tied
            source = "model.embed_tokens.weight" if tied else f"{linear.name}.weight"
            if f.fprop == "bf16" and f.dgrad == "fp8" and f.weight is not None and source in tensors:
                values = decode(*encode(tensors[source].float(), f.weight), f.weight)
                self.weights.fill_gradient(linear.name, values)

    def forward(
        self, sequences: list[list[int]], answer_lengths: list[int], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of the answers' tokens under the loaded version.

        Args:
            sequences: Token ids, prompt and answer, of each response.
            answer_lengths: How many ids at the end of each sequence are the answer.
            temperature: Logprobs are of ``logits / temperature``.

        Returns:
            logprob and entropy, each [sum of answer_lengths] float32, response after response.

        Raises:
            FloatingPointError: the model's output is not finite; names the module where that began.
        """
        count = sum(answer_lengths)
        pairs = zip(sequences, answer_lengths, strict=True)
        targets = [id for sequence, answer in pairs for id in sequence[len(sequence) - answer :]]
        x = self.hidden(sequences, answer_lengths)
        fill = x.shape[0] - count
        embedding = self.parameters["model.embed_tokens.weight"]
        head = embedding if self.description.tied else self.parameters["lm_head.weight"]
        logprob, entropy = autograd.head_logprob(
            x,
            self.weights,
            torch.tensor([*targets, *[0] * fill], device=x.device),
            torch.full((count + fill,), temperature, device=x.device),
            self.parameters["model.norm.weight"],
            head,
        )
        if not is_finite(x[:count], logprob[:count], entropy[:count]):
            rows, attend = self._rows(sequences)
            module = first_not_finite(self.weights, [rows], attend)
            raise FloatingPointError(
                f"{module} gives NaN or infinite values in the forward pass of weight version {self.weights.version}, whose "
                "weights are finite: activations overflow. Lower optimizer.lr, and resume from a checkpoint before that."
            )
        return logprob[:count], entropy[:count]

    def hidden(self, sequences: list[list[int]], answer_lengths: list[int]) -> Tensor:
        """Hidden states before the final norm from which the answers' tokens are predicted.

        Arguments as in :meth:`forward`.

        Returns:
            [M, hidden] float32, M being the sum of ``answer_lengths`` filled up to whole row tiles.
        """
        assert self.weights.version >= 0, "refresh() comes first"
        chosen: list[int] = []  # rows whose next token is an answer token
        end = 0
        for sequence, answer in zip(sequences, answer_lengths, strict=True):
            assert 0 <= answer < len(sequence), "the first token of an answer needs a token before it"
            end += len(sequence) - 1
            chosen += range(end - answer, end)
        rows, attend = self._rows(sequences)
        x = autograd.embedding(rows, self.weights, self.parameters["model.embed_tokens.weight"], self.padding)
        for layer in self.weights.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                # The forward pass has the same bits each time, so its repetition gives the same gradient.
                x = checkpoint(decoder_layer, x, layer, attend, rows, use_reentrant=False, preserve_rng_state=False)
            else:
                x = decoder_layer(x, layer, attend, rows)
        return x[torch.tensor([*chosen, *[0] * (-len(chosen) % ROW_TILE)], device=x.device)]

    def _rows(self, sequences: list[list[int]]) -> tuple[Rows, Attend]:
        """The sequences one after the other; the last token of each predicts nothing that is trained on."""
        lengths = [len(sequence) - 1 for sequence in sequences]
        ids = np.array([id for sequence in sequences for id in sequence[:-1]], np.int64)
        owner = np.repeat(np.arange(len(sequences), dtype=np.int64), lengths)
        position = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
        blocks = Blocks.packed(lengths)

        def attend(layer: LayerWeights, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
            return autograd.attention(q, k, v, layer, rows, blocks)

        rows = Rows.make(ids, owner, position, blocks, self.rope, shape=self.description, tile=TOKEN_TILE)
        return rows, attend


def _linears(layer: Any) -> list[nn.Linear]:
    a, m = layer.self_attn, layer.mlp
    modules = [a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj]
    return [base_linear(module) for module in modules]
