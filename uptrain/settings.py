"""What a user can set about an uptraining run, with the defaults that are recommended."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class UptrainSettings(BaseModel):
    """Everything that determines the resulting weights, and how the run is watched and saved.

    The budget is one of ``tokens``, ``steps``, or ``fraction`` × ``pretraining_tokens`` (the paper's alpha).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str = Field("stdlib", description="corpus to train on: stdlib, a text/jsonl/parquet file, or a datasets id")
    fraction: float | None = Field(
        None, gt=0, le=1, description="uptraining tokens / pretraining tokens, the paper's alpha"
    )
    pretraining_tokens: int | None = Field(None, gt=0, description="tokens the source was pretrained on")
    tokens: int | None = Field(None, gt=0, description="budget in tokens, instead of a fraction")
    steps: int | None = Field(None, gt=0, description="budget in optimizer steps, instead of tokens")

    block: int = Field(512, gt=1, description="tokens of one packed block")
    batch: int = Field(8, gt=0, description="blocks of one optimizer step, over all processes")
    micro_batch: int = Field(8, gt=0, description="blocks of one forward pass on one process")

    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    final_learning_rate: float = Field(
        0.1, ge=0, le=1, description="share of the peak at the end (cosine, warmup-stable-decay)"
    )
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps in which the learning rate rises")
    schedule: Literal["cosine", "linear", "constant", "warmup-stable-decay"] = "cosine"
    weight_decay: float = Field(0.1, ge=0, description="not applied to norms and biases")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")

    teacher: str | None = Field(
        None, description="checkpoint to distil from: 'source', a folder or an id; none: text alone"
    )
    distillation_weight: float = Field(1.0, ge=0, le=1, description="share of KL(teacher || student) in the loss")

    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="of the forward pass; weights are kept in float32"
    )
    device: Literal["auto", "cpu"] = "auto"
    seed: int = Field(0, ge=0, lt=2**32)

    log_every: int = Field(10, gt=0, description="steps between two lines of progress")
    save_every: int = Field(200, gt=0, description="steps between two saves that a run can resume from")
    keep: int = Field(2, gt=0, description="saves to keep")
    eval_data: str | None = Field(None, description="held-out corpus to follow during the run")
    eval_every: int = Field(
        0, ge=0, description="steps between two held-out evaluations; 0: at the start and the end only"
    )
    eval_tokens: int = Field(16384, gt=0)


# What may change when a run resumes: how it is watched and saved, not what it computes.
FREE_ON_RESUME = frozenset(
    {"log_every", "save_every", "keep", "micro_batch", "device", "eval_data", "eval_every", "eval_tokens"}
)
