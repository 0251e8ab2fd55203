"""The commands `convert` and `inspect`: read options, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import console
from ..errors import UsageError
from ..options import DryRun, Out, Overwrite, Source, Trust, numbers


def convert(
    checkpoint: Source,
    out: Out,
    groups: Annotated[int, typer.Option("--groups", "-g", help="KV heads of the result; divides those of the source.")],
    method: Annotated[
        str | None,
        typer.Option(
            help="How a group becomes one head: mean, first, random, aligned or folded. "
            "Default: folded where calibration text is given, else mean."
        ),
    ] = None,
    grouping: Annotated[
        str | None,
        typer.Option(
            help="Which heads form a group: contiguous (neighbours) or similarity. Default: similarity for folded."
        ),
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Text the method may look at; never the text you will evaluate on.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=1, help="Tokens of that text to read.")] = 131_072,
    statistics: Annotated[
        Path | None, typer.Option(help="File to keep the statistics of the text in, or to take them from.")
    ] = None,
    refine: Annotated[
        int, typer.Option(min=0, help="Training steps per layer that fit each block to the source; try 200.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Where calibration and refinement run: cpu, cuda, …")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the method random, and of the order of the text in refinement.")] = 0,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    trust_remote_code: Trust = False,
) -> None:
    """Turn a checkpoint into one with fewer KV heads, ready for transformers, vLLM, SGLang and llama.cpp.

    Tensors that stay are copied byte for byte, so a checkpoint may be larger than memory. Anything that cannot be
    converted correctly is refused by name before anything is written.
    """
    from .plan import default_method
    from .run import plan_conversion, run_plan

    looks_at_text = calibration is not None or statistics is not None
    method, grouping = default_method(method, grouping, looks_at_text=looks_at_text)
    plan = plan_conversion(checkpoint, groups=groups, method=method, grouping=grouping, revision=revision)
    if refine and not calibration:
        raise UsageError("Refinement fits to text, and there is none.", "Name some: --calibration stdlib, or a file.")
    if dry_run:
        console.table(f"Converting {checkpoint} by {method}", ["", "source", "result"], plan.describe())
        return
    if looks_at_text and not refine and not plan.rewrites_queries:
        console.warn(f"{method} looks at no text, so --calibration and --statistics change nothing.")
    if looks_at_text:
        from .calibrated import Calibration, convert_calibrated

        text = Calibration(calibration, calibration_tokens, refine=refine, statistics=statistics, device=device)
        convert_calibrated(plan, out, text, overwrite=overwrite, seed=seed, trust_remote_code=trust_remote_code)
    else:
        if method == "folded":
            console.warn("folded without calibration text can be worse than mean; add --calibration TEXT.")
        run_plan(plan, out, overwrite=overwrite, seed=seed)
    console.result(out)


def inspect(
    checkpoint: Source,
    groups: Annotated[
        str | None, typer.Option(help="Numbers of groups to predict the damage of, such as 8,4,2,1.")
    ] = None,
    statistics: Annotated[
        Path | None, typer.Option(help="Statistics that `convert --calibration TEXT --statistics FILE` wrote.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what a checkpoint is, and what its KV cache would be at every number of groups. config.json is enough.

    With --groups and --statistics: the share of K and V energy that `folded` would lose in each layer.
    """
    if (groups is None) != (statistics is None):
        raise UsageError("Predicting damage needs both --groups and --statistics.", "See `headfold inspect --help`.")
    if groups is not None and statistics is not None:
        _show_damage(checkpoint, revision, numbers(groups), statistics, as_json)
        return
    from .inspect import inspect_checkpoint

    found = inspect_checkpoint(checkpoint, revision=revision)
    if as_json:
        console.data.print(found.to_json(), markup=False)
        return
    rows = [
        [
            str(row.groups),
            f"{row.bytes_per_token:,}",
            console.human_bytes(row.bytes_per_1000_tokens),
            f"{row.share_of_source:.3g}",
        ]
        for row in found.cache
    ]
    console.table(
        f"{checkpoint}: {found.model_type} ({found.model_class}), {found.parameters:,} parameters, "
        f"{found.attention_layers} layers, {found.query_heads} query heads, {found.kv_heads} KV heads of width "
        f"{found.head_dim}, cache in {found.dtype}",
        ["groups", "KV bytes per token", "per 1,000 tokens", "of the source"],
        rows,
    )


def _show_damage(checkpoint: str, revision: str | None, groups: list[int], statistics: Path, as_json: bool) -> None:
    """A row a layer, a column a number of groups; the layer that loses most at each is marked."""
    import json
    from dataclasses import asdict

    from .inspect import predict_damage

    found = list(predict_damage(checkpoint, groups, statistics, revision=revision))
    if as_json:
        console.data.print(json.dumps([asdict(damage) for damage in found], indent=2), markup=False)
        return
    worst = {
        wanted: max((damage.total, damage.layer) for damage in found if damage.groups == wanted) for wanted in groups
    }
    rows = []
    for layer in sorted({damage.layer for damage in found}):
        here = {damage.groups: damage for damage in found if damage.layer == layer}
        cells = [f"{here[g].keys:.1%} {here[g].values:.1%}" + (" ←" if worst[g][1] == layer else "") for g in groups]
        rows.append([str(layer), *cells])
    console.table("Share of K and V energy lost (← most)", ["layer", *(f"G = {wanted}" for wanted in groups)], rows)
