"""What a user can set about a comparison, with the defaults that are recommended."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..corpus import Columns
from ..spans import MEAN_SPAN, NOISE_DENSITY

Count = Annotated[int, Field(gt=0)]


class EvalSettings(BaseModel):
    """Everything that the numbers depend on besides the checkpoints."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str = Field(
        "stdlib", description="text never trained on: stdlib, a text/jsonl/parquet file, or a datasets id"
    )
    tokens: int | None = Field(65_536, gt=0, description="tokens to score; null: the whole text")
    window: int | None = Field(
        None, gt=1, description="tokens that a model sees at once; by default 512 or the model's own limit"
    )
    stride: int | None = Field(None, gt=0, description="tokens between two windows; by default half a window")
    batch: int = Field(8, gt=0, description="windows of one forward pass")
    source_column: str = Field("text", description="of the records of --data: the text, what a model reads")
    target_column: str | None = Field(
        None, description="what an encoder-decoder is to write of it; without one spans are cut out of the text"
    )
    noise_density: float = Field(NOISE_DENSITY, gt=0, lt=1, description="share of the tokens that are cut out of it")
    mean_span: float = Field(MEAN_SPAN, ge=1, description="tokens of a span that is cut out, on average")
    bos: bool | None = Field(None, description="begin documents with BOS; by default as the tokenizer does")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: that of the source's weights; float32 on a CPU"
    )
    device: str = Field("auto", description="auto, cpu, cuda, …")
    source_cache: str | None = Field(
        None, description="folder that keeps the source's scores; found there, the source is not run: no KL, no speed"
    )

    contexts: list[Count] | None = Field(
        None, description="prompt lengths that decoding is timed after; by default 64,256 on a CPU, else 256,1024,4096"
    )
    decode_batches: list[Count] = Field([1, 8], description="sequences decoded side by side, one measurement each")
    new_tokens: int = Field(32, gt=0, description="tokens decoded in one measurement")
    repeats: int = Field(3, ge=0, description="measurements of each point, the models in turn; 0: no timing")
    memory: str | None = Field(None, description="memory of the device to serve from, such as 24GB: what fits into it?")

    needles: int = Field(8, ge=0, description="passages hidden for retrieval, per length; 0: none")
    needle_lengths: list[Count] | None = Field(
        None, description="tokens of text they are hidden in; by default a quarter of the model's limit and all of it"
    )

    tasks: list[str] = Field([], description="tasks of lm-eval: names, or YAML files and folders of your own")
    shots: int | None = Field(None, ge=0, description="examples shown before each question; by default the task's own")
    task_limit: int | None = Field(None, gt=0, description="questions per task; by default all")

    @property
    def columns(self) -> Columns:
        """Of the records to score."""
        return Columns(self.source_column, self.target_column)
