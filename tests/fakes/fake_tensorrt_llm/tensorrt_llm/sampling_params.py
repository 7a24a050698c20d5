"""Sampling of the FAKE: the fields of the original that trtl_rl sets, with its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class LogprobMode(str, Enum):
    RAW = "raw"
    PROCESSED = "processed"


@dataclass
class SamplingParams:
    max_tokens: int = 32
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    end_id: int | None = None
    pad_id: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    logprobs: int | None = None
    logprobs_mode: LogprobMode = LogprobMode.RAW
    logprobs_simple_format: bool = False
