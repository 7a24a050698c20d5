"""The parts of ``RunConfig`` that say what a run learns from and what scores it: data, tasks, rewards, evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trtl_rl.config_parts import Count, Part, Positive


class MixtureConfig(Part):
    """One of several data sets that a run draws from."""

    data: str = Field(description="As the run's data.")
    weight: Positive = Field(1.0, description="How often its rows are drawn, relative to the others.")
    split: str = Field("train", description="As task.split.")
    prompt_column: str = Field("prompt", description="As task.prompt_column.")
    columns: dict[str, str] = Field(default_factory=dict, description="As task.columns.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="As task.arguments.")


class TaskConfig(Part):
    """How prompts and answers are made from the rows of ``data``."""

    preset: str | None = Field(
        None, description="A named task that fills in the rest, data included: demo, gsm8k, math, reasoning-gym/NAME."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameters of a reasoning-gym task; size (default 1000) is its number of rows.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="New column names and the data's own, for example answer: solution; rewards see the new ones.",
    )
    mixture: list[MixtureConfig] = Field(
        default_factory=list, description="Several data sets instead of data; rows say in the column source where from."
    )
    streaming: bool = Field(False, description="Read data as it is drawn; held_out takes its first rows.")
    shuffle_buffer: Count = Field(10_000, description="streaming: rows among which each draw chooses.")
    split: str = Field("train", description="Split of a Hugging Face data set.")
    prompt_column: str = Field("prompt", description="Column with the prompt: text, or a list of chat messages.")
    template: str | None = Field(None, description="Text around the prompt: '{prompt}' stands for the column's text.")
    system: str | None = Field(None, description="System message, for models with a chat template.")
    chat: bool | None = Field(None, description="Apply the chat template; by default when the tokenizer has one.")
    shuffle: bool = Field(
        True, description="Draw rows in a random order, another one each epoch; false: as they stand."
    )
    curriculum: str | None = Field(
        None,
        description="A column with numbers, or file.py:function that gives a row's difficulty: every epoch goes from easy to hard.",
    )
    held_out: Annotated[int, Field(ge=0)] = Field(0, description="Rows kept for evaluation, never trained on.")
    too_long: Literal["refuse", "skip"] = Field(
        "refuse", description="Rows whose prompt leaves no room for the answer; skip: leave them out, and say how many."
    )
    min_prompt_tokens: Count | None = Field(None, description="Leave shorter prompts out, and say how many.")
    max_prompt_tokens: Count | None = Field(None, description="Leave longer prompts out, and say how many.")

    skip_below: float | None = Field(
        None, description="Pass over a prompt once if its last group's mean reward was this or less; null: never."
    )
    skip_above: float | None = Field(None, description="The same for this or more.")

    @model_validator(mode="after")
    def _fits_together(self) -> TaskConfig:
        if self.skip_below is not None and self.skip_above is not None and self.skip_below >= self.skip_above:
            raise ValueError(
                f"task.skip_below={self.skip_below:g} must be less than task.skip_above={self.skip_above:g}"
            )
        low, high = self.min_prompt_tokens, self.max_prompt_tokens
        if low is not None and high is not None and low > high:
            raise ValueError(f"task.min_prompt_tokens={low} is more than task.max_prompt_tokens={high}")
        if self.streaming and (self.curriculum is not None or self.mixture):
            key = "task.curriculum" if self.curriculum is not None else "task.mixture"
            raise ValueError(f"{key} needs all rows, which task.streaming does not have")
        if not self.streaming and self.shuffle_buffer != TaskConfig.model_fields["shuffle_buffer"].default:
            raise ValueError("task.shuffle_buffer belongs to task.streaming=true")
        return self


class RewardConfig(Part):
    """One reward function: a built-in's name, or ``file.py:function``, or ``package.module:function``."""

    name: str = Field(description="A built-in reward, file.py:function, or package.module:function.")
    weight: float = Field(1.0, description="Factor in the total reward.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments given to the function.")
    in_process: bool | None = Field(
        None,
        description="Run it in the trainer's process, where it cannot be killed; default: in a process of its own, but for "
        "exact_match and length_penalty.",
    )
    timeout: Positive | None = Field(
        None, description="Seconds for one call, which scores one group; then its process is killed. Default: 60."
    )
    workers: Count = Field(1, description="Processes that score at the same time.")
    on_error: Literal["error", "exclude", "value"] = Field(
        "error",
        description="A call that fails, hangs or gives no valid value: error ends the run, exclude leaves the samples out, "
        "value gives them error_value.",
    )
    error_value: float | None = Field(None, description="on_error=value: the reward of such samples.")

    @model_validator(mode="after")
    def _value_only_where_it_acts(self) -> RewardConfig:
        if (self.on_error == "value") != (self.error_value is not None):
            raise ValueError("rewards: error_value and on_error=value belong together")
        return self


class EvaluationConfig(Part):
    """Held-out prompts, answered greedily and sampled."""

    every: Annotated[int, Field(ge=0)] = Field(0, description="Updates between evaluations; 0: start and end only.")
    prompts: Annotated[int, Field(ge=0)] = Field(0, description="Held-out prompts to evaluate on; 0: none.")
    data: str | None = Field(
        None, description="Other data than task.held_out, with the same columns; as the run's data."
    )
    split: str | None = Field(None, description="Another split of the data than task.split, for example test.")
    samples: Count = Field(1, description="Sampled answers per prompt, for mean, pass and majority at so many.")
    temperature: Positive | None = Field(None, description="Of sampled answers; default: sampling.temperature.")
    pass_score: float = Field(1.0, description="An answer with this score or more is right, for pass and majority.")
    scorer: str | Annotated[list[str], Field(min_length=1)] = Field(
        "exact_match",
        description="The evaluation target: a reward function, but never the reward itself. A list: several targets, of the same "
        "answers.",
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the only scorer.")
    overlap: bool | None = Field(
        None,
        description="Train on while evaluation's answers are generated, which then may span versions (stamped). Default: where "
        "buffer.max_staleness is above 0, since such runs do not repeat bit for bit anyway.",
    )

    @model_validator(mode="after")
    def _arguments_of_one_scorer(self) -> EvaluationConfig:
        if self.arguments and len(self.scorers) > 1:
            raise ValueError("evaluation.arguments belongs to a single evaluation.scorer, not to a list of them")
        return self

    @property
    def scorers(self) -> list[str]:
        """``scorer`` as a list."""
        return [self.scorer] if isinstance(self.scorer, str) else self.scorer

    @property
    def own_data(self) -> bool:
        """Whether it has rows apart from the run's."""
        return self.data is not None or self.split is not None
