"""LoRA with peft: adapters beside a base that stays what it is. peft makes, names and reads them; the kernels compute them.

A checkpoint of such a run is a peft adapter (``adapter_config.json``, ``adapter_model.safetensors`` with FP32 masters) beside
the optimizer's state; the base is not in it, so it says which one that was.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trtl_rl.config import RunConfig, explain, validate_config
from trtl_rl.config_parts import LORA_REFUSED, LoraConfig
from trtl_rl.errors import UserError
from trtl_rl.model.source import DEMO, ModelSource, weights_digest
from trtl_rl.trainer.checkpoint import read_state

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from trtl_rl.model.bind import TrainableDecoder

NAME = "default"  # peft's own, which its files do not carry
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LABELS = {
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "runtime_config",
    "megatron_core", "ensure_weight_tying", "qalora_group_size",
}  # fmt: skip
_TAKEN = {"r", "lora_alpha", "use_rslora", "target_modules", "task_type"}


def checked(config: RunConfig, given: Any, source: ModelSource) -> RunConfig:
    """The configuration of a run, with what a ``peft.LoraConfig`` says where one is given.

    Raises:
        UserError: it says what the kernels do not compute, or what ``lora`` says too; or peft is missing.
    """
    if (config.lora.rank or given is not None) and importlib.util.find_spec("peft") is None:
        asked = f"lora.rank={config.lora.rank}" if given is None else "peft_config"
        raise UserError(f"{asked} needs peft: pip install 'trtl-rl[lora]'. Or leave it out, and train all weights.")
    if given is None:
        return config
    if config.lora.rank:
        raise UserError("peft_config and lora.rank say the same thing: give one of them.")
    adapters = from_peft(given, str(source.config.get("model_type")))
    return validate_config({**config.model_dump(exclude_unset=True), "lora": adapters.model_dump()}, "peft_config")


def from_peft(given: Any, model_type: str) -> LoraConfig:
    """The keys of ``lora`` for a ``peft.LoraConfig``.

    Args:
        model_type: Of the model's ``config.json``: peft has targets for each, where none are named.

    Raises:
        UserError: names every setting that is not taken, with the reason.
    """
    import peft
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    if type(given) is not peft.LoraConfig:
        raise UserError(
            f"peft_config is a {type(given).__name__}: the kernels compute LoRA alone. Give a peft.LoraConfig."
        )
    default = peft.LoraConfig()
    refused = []
    if given.lora_dropout:
        refused.append(f"lora_dropout={given.lora_dropout}: {LORA_REFUSED['dropout']}")
    if given.task_type not in (None, "CAUSAL_LM"):
        refused.append(f"task_type={given.task_type}: the policy is a causal language model")
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name in _TAKEN | _LABELS | {"lora_dropout"} or value == getattr(default, field.name):
            continue
        reason = LORA_REFUSED.get(field.name, "adapters have one rank, in every layer, and nothing beside A and B")
        refused.append(f"{field.name}={value!r}: {reason}")
    if refused:
        raise UserError(f"peft_config is not taken: {'; '.join(refused)}.")
    targets: Any = given.target_modules
    if targets is None:
        targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type, "all-linear")
    if isinstance(targets, str) and targets != "all-linear":
        raise UserError(
            f"peft_config is not taken: target_modules={targets!r} is a pattern. List the linears' names, such as "
            "['q_proj', 'v_proj'], or write 'all-linear'."
        )
    # peft divides by the root of the rank there instead of by the rank.
    alpha = given.lora_alpha * (given.r**0.5 if given.use_rslora else 1)
    listed = targets if isinstance(targets, str) else sorted(targets)
    try:
        return LoraConfig(rank=given.r, alpha=alpha, targets=listed)
    except ValidationError as error:
        raise UserError(f"peft_config is not taken: {explain(error)}.") from None


def base_name(source: ModelSource) -> str:
    """How peft finds the base again: a hub name, or a directory."""
    local = source.name == DEMO or Path(source.name).expanduser().is_dir()
    return str(source.path.resolve()) if local else source.name


class Adapters:
    """peft's adapters in a model that stays in use as it is: its linears are wrapped, and all else is frozen.

    Args:
        model: With its quantisers; changed in place.
        seed: Of A; B is zero, so that the model begins as its base.
        base: What the files name as the base.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig, *, seed: int, base: str) -> None:
        import peft
        import torch

        alpha: Any = int(config.alpha) if config.alpha.is_integer() else config.alpha  # peft's files have whole numbers
        made = peft.LoraConfig(
            r=config.rank, lora_alpha=alpha, target_modules=list(config.targets), task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft reads what transformers has renamed
            torch.manual_seed(seed)
            self._model: Any = peft.get_peft_model(model, made, adapter_name=NAME)
        self._base = base

    def write(self, directory: Path) -> None:
        """Write peft's two files into ``directory``."""
        import copy

        import peft
        from safetensors.torch import save_file

        tensors = peft.get_peft_model_state_dict(self._model, adapter_name=NAME, save_embedding_layers=False)
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()},
            directory / WEIGHTS,
            {"format": "pt"},
        )
        config = copy.deepcopy(self._model.peft_config[NAME])
        config.base_model_name_or_path, config.inference_mode = self._base, True
        config.target_modules = sorted(config.target_modules)  # a set's order changes from process to process
        config.save_pretrained(directory)

    def read(self, directory: Path) -> None:
        """Load what :meth:`write` wrote. Raises UserError where it is of other adapters."""
        import peft
        from safetensors.torch import load_file

        file = directory / WEIGHTS
        tensors = load_file(file)
        expected = peft.get_peft_model_state_dict(self._model, adapter_name=NAME, save_embedding_layers=False)
        shapes = [{name: tuple(tensor.shape) for name, tensor in found.items()} for found in (tensors, expected)]
        wrong = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
        if wrong:
            raise UserError(
                f"{file} does not hold this run's adapters: {wrong[0]} is another one, or on one side only."
            )
        peft.set_peft_model_state_dict(self._model, tensors, adapter_name=NAME)

    def save_with(self, accelerator: Accelerator) -> None:
        """Let Accelerate's states hold the adapters in the model's place."""

        def saving(models: list[Any], weights: list[Any], directory: str) -> None:
            weights.clear()
            self.write(Path(directory))

        def loading(models: list[Any], directory: str) -> None:
            models.clear()
            self.read(Path(directory))

        accelerator.register_save_state_pre_hook(saving)
        accelerator.register_load_state_pre_hook(loading)


def summary(decoder: TrainableDecoder) -> str:
    """What is trained and what a refit sends, of a decoder that has been quantised, for people."""
    d, tensors = decoder.description, decoder.snapshot
    sent = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith((".lora_A.weight", ".lora_B.weight")))
    trained = sum(p.numel() for p in decoder.model.parameters() if p.requires_grad)
    total = sum(tensor.nbytes for tensor in tensors.values())
    return (
        f"LoRA: {len(d.adapters)} adapters of rank {d.adapters[0].rank}, {trained:,} trained parameters. The base stays as it "
        f"is, so a refit sends at most {sent:,} of {total:,} bytes."
    )


def holds_adapters(checkpoint: Path) -> bool:
    """Whether a checkpoint is one of adapters."""
    return (checkpoint / CONFIG).is_file()


def of_checkpoint(model: PreTrainedModel, source: ModelSource, checkpoint: Path) -> Adapters:
    """The adapters of a run's checkpoint, put into its base.

    Raises:
        UserError: ``source`` has other weights than the run's base had.
    """
    check_base(source, checkpoint)
    config = LoraConfig.model_validate(read_state(checkpoint)["config"]["lora"])
    adapters = Adapters(model, config, seed=0, base=base_name(source))
    adapters.read(checkpoint)
    return adapters


def check_base(source: ModelSource, checkpoint: Path) -> None:
    """Raise UserError where ``source`` has other weights than the base of the run whose checkpoint this is."""
    if read_state(checkpoint)["identity"]["weights of model"] != weights_digest(source.path):
        raise UserError(
            f"{checkpoint} holds adapters for {source.name} as it was when the run began, and its weights are others now: bring "
            "those back."
        )


def write_rounded(checkpoint: Path, directory: Path) -> None:
    """The adapters of a checkpoint rounded to BF16, which is what both sides of the run computed with."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(checkpoint / WEIGHTS).items()}
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    (directory / WEIGHTS).chmod(0o644)  # as the other files; safetensors lets only the owner read
    shutil.copyfile(checkpoint / CONFIG, directory / CONFIG)


def merged(base: PreTrainedModel, checkpoint: Path) -> PreTrainedModel:
    """``base`` with the adapters of a checkpoint added to its weights: both in BF16, their sum in float32, rounded to BF16."""
    import peft
    import torch

    model: Any = base
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        wrapped: Any = peft.PeftModel.from_pretrained(model.float(), str(checkpoint))
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.copy_(parameter.bfloat16())
    plain: PreTrainedModel = wrapped.merge_and_unload().bfloat16()
    return plain


def identity(config: LoraConfig, source: ModelSource) -> dict[str, Any]:
    """What a checkpoint is bound to that does not hold its base: the adapters, and the base's weights; each None for a run
    without adapters."""
    adapted = bool(config.rank)
    return {
        "lora": config.model_dump(mode="json") if adapted else None,
        "weights of model": weights_digest(source.path) if adapted else None,
    }
