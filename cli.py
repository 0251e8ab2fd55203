"""The command line: read options, call one function, print. The one place that turns an error into an exit code."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__, console
from .errors import HeadfoldError
from .uptrain.settings import UptrainSettings

app = typer.Typer(
    name="headfold",
    help="Turn a multi-head-attention checkpoint into a grouped-query one, uptrain it, and see what it cost and won.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Source = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Folder of the checkpoint, or its id on the Hugging Face hub.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write. It appears whole or not at all.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output folder if it exists.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, write nothing.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        console.data.print(f"headfold {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and context.invoked_subcommand not in (None, "uptrain"):
        from .errors import UsageError

        raise UsageError(
            f"`headfold {context.invoked_subcommand}` runs on one process, and this is one of several.",
            "Only uptrain goes under accelerate launch; call this one as it is.",
        )


@app.command(
    epilog="Example: `headfold convert meta-llama/Llama-2-7b-hf --groups 8 --calibration text.jsonl -o llama-2-7b-gqa8`"
)
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
    from .convert.plan import default_method
    from .convert.run import plan_conversion, run_plan
    from .errors import UsageError

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
        from .convert.calibrated import Calibration, convert_calibrated

        text = Calibration(calibration, calibration_tokens, refine=refine, statistics=statistics, device=device)
        convert_calibrated(plan, out, text, overwrite=overwrite, seed=seed, trust_remote_code=trust_remote_code)
    else:
        if method == "folded":
            console.warn("folded without calibration text can be worse than mean; add --calibration TEXT.")
        run_plan(plan, out, overwrite=overwrite, seed=seed)
    console.result(out)


@app.command(
    epilog="Example: `headfold inspect ./llama-2-7b`, or with text: `… --groups 8,4 --statistics moments.safetensors`"
)
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
    from .errors import UsageError

    if (groups is None) != (statistics is None):
        raise UsageError("Predicting damage needs both --groups and --statistics.", "See `headfold inspect --help`.")
    if groups is not None and statistics is not None:
        _show_damage(checkpoint, revision, _numbers(groups), statistics, as_json)
        return
    from .convert.inspect import inspect_checkpoint

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

    from .convert.inspect import predict_damage

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


def _numbers(text: str) -> list[int]:
    from .errors import UsageError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError as problem:
        raise UsageError(f"{text!r} is no list of numbers.", "Write them as 8,4,2,1.") from problem


def _help(field: str) -> str | None:
    return UptrainSettings.model_fields[field].description


def _default(field: str) -> Any:
    return UptrainSettings.model_fields[field].default


@app.command(
    epilog="Example: `headfold uptrain gqa8 --data text.jsonl --fraction 0.05 --pretraining-tokens 2e12 -o gqa8-up`"
)
def uptrain(
    checkpoint: Source,
    out: Out,
    data: Annotated[str, typer.Option(help=_help("data"))],
    fraction: Annotated[float | None, typer.Option(help=_help("fraction"))] = None,
    pretraining_tokens: Annotated[
        float | None, typer.Option(help=f"{_help('pretraining_tokens')}; 2e12 is understood")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help=_help("tokens"))] = None,
    steps: Annotated[int | None, typer.Option(help=_help("steps"))] = None,
    block: Annotated[int, typer.Option(help=_help("block"))] = _default("block"),
    batch: Annotated[int, typer.Option(help=_help("batch"))] = _default("batch"),
    micro_batch: Annotated[int, typer.Option(help=_help("micro_batch"))] = _default("micro_batch"),
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", help=_help("learning_rate"))] = _default(
        "learning_rate"
    ),
    final_learning_rate: Annotated[float, typer.Option(help=_help("final_learning_rate"))] = _default(
        "final_learning_rate"
    ),
    warmup: Annotated[float, typer.Option(help=_help("warmup"))] = _default("warmup"),
    schedule: Annotated[str, typer.Option(help="cosine, linear, constant or warmup-stable-decay")] = _default(
        "schedule"
    ),
    weight_decay: Annotated[float, typer.Option(help=_help("weight_decay"))] = _default("weight_decay"),
    clip: Annotated[float, typer.Option(help=_help("clip"))] = _default("clip"),
    teacher: Annotated[str | None, typer.Option(help=_help("teacher"))] = None,
    distillation_weight: Annotated[float, typer.Option(help=_help("distillation_weight"))] = _default(
        "distillation_weight"
    ),
    precision: Annotated[str, typer.Option(help=f"auto, fp32 or bf16, {_help('precision')}")] = _default("precision"),
    device: Annotated[str, typer.Option(help="auto or cpu")] = _default("device"),
    seed: Annotated[int, typer.Option(help="of the order of the text")] = _default("seed"),
    log_every: Annotated[int, typer.Option(help=_help("log_every"))] = _default("log_every"),
    save_every: Annotated[int, typer.Option(help=_help("save_every"))] = _default("save_every"),
    keep: Annotated[int, typer.Option(help=_help("keep"))] = _default("keep"),
    eval_data: Annotated[str | None, typer.Option(help=_help("eval_data"))] = None,
    eval_every: Annotated[int, typer.Option(help=_help("eval_every"))] = _default("eval_every"),
    eval_tokens: Annotated[int, typer.Option(help="tokens of one held-out evaluation")] = _default("eval_tokens"),
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw an unfinished run away instead of continuing it.")
    ] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    trust_remote_code: Trust = False,
) -> None:
    """Continue the pretraining of a converted checkpoint for a small share of its budget.

    One process: call it as it is. Several: `accelerate launch --num_processes 8 -m headfold uptrain …`.
    A run that was stopped or killed goes on from its newest save when the same command is given again.
    """
    given = {name: value for name, value in locals().items() if name in UptrainSettings.model_fields}
    for name in ("pretraining_tokens", "tokens"):
        given[name] = _whole(name, given[name])
    settings = _settings(given)
    if dry_run:
        from .uptrain.budget import plan_budget

        budget = plan_budget(settings)
        rows = [
            ["tokens", f"{budget.tokens:,}"],
            ["steps", f"{budget.steps:,}"],
            ["tokens per step", f"{budget.tokens_per_step:,}"],
        ]
        console.table(f"Uptraining {checkpoint}", ["budget", ""], rows)
        return
    from .uptrain.loop import uptrain_checkpoint

    uptrain_checkpoint(
        checkpoint, out, settings, overwrite=overwrite, restart=restart, trust_remote_code=trust_remote_code
    )
    console.result(out)


def _whole(name: str, number: float | None) -> int | None:
    """2e12 on the command line is a whole number of tokens."""
    from .errors import UsageError

    if number is None:
        return None
    if not math.isfinite(number) or number != int(number):
        raise UsageError(f"--{name.replace('_', '-')} {number} is no whole number of tokens.")
    return int(number)


def _settings(given: dict[str, Any]) -> UptrainSettings:
    """Validate options by the very model that validates recipes."""
    from pydantic import ValidationError

    from .errors import UsageError

    try:
        return UptrainSettings(**given)
    except ValidationError as problem:
        fault = problem.errors()[0]
        option = "--" + str(fault["loc"][0]).replace("_", "-")
        raise UsageError(f"{option} {fault['input']}: {fault['msg']}.", "See `headfold uptrain --help`.") from problem


@app.command(
    "eval",
    epilog="Example: `headfold eval llama-2-7b llama-2-7b-gqa8 llama-2-7b-gqa8-up --data wikitext.txt -o report`",
)
def evaluate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The original checkpoint: folder or hub id.")],
    out: Out,
    data: Annotated[
        str, typer.Option(help="text never trained on: stdlib, a text/jsonl/parquet file, or a datasets id")
    ],
    others: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONVERTED]...", help="Made from it; none: the source alone."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to score; 0 for the whole text.")] = 65_536,
    window: Annotated[
        int | None, typer.Option(help="Tokens that a model sees at once; 512 or the model's own limit.")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between two windows; half a window.")] = None,
    batch: Annotated[int, typer.Option(help="Windows of one forward pass.")] = 8,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Compare checkpoints with their source: perplexity, KL, KV-cache size and decoding speed, with their errors.

    Writes results.json, report.md and one self-contained report.html.
    """
    from .eval.compare import compare
    from .eval.report import print_report

    results = compare(
        source, others or [], data=data, out=out, window=window, stride=stride, max_tokens=tokens or None,
        batch_size=batch, dtype=dtype, device=device, overwrite=overwrite, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    print_report(results)
    console.result(out / "report.html")


@app.command(
    epilog="Example: `headfold sweep ./small --groups 8,4,2,1 --calibration text.jsonl --data held-out.jsonl -o sweep`"
)
def sweep(
    checkpoint: Source,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the table, the plot and the page.")],
    groups: Annotated[str, typer.Option(help="Numbers of groups, such as 8,4,2,1.")],
    data: Annotated[str, typer.Option(help="Text to measure on, never the one that calibration sees.")],
    calibration: Annotated[str, typer.Option(help="Text that the methods may look at.")],
    methods: Annotated[str, typer.Option(help="Methods, each also with +refine.")] = "mean,first,random,aligned,folded",
    calibration_tokens: Annotated[int, typer.Option(min=1, help="Tokens of calibration text to read.")] = 131_072,
    refine: Annotated[int, typer.Option(min=1, help="Steps per layer for methods with +refine.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to score.")] = 32_768,
    window: Annotated[int, typer.Option(min=2, help="Tokens that a model sees at once.")] = 512,
    device: Annotated[str, typer.Option(help="Where calibration and refinement run: cpu, cuda, …")] = "cpu",
) -> None:
    """Convert in many ways and plot perplexity against KV-cache size, before any uptraining: the way to choose G.

    Rows that are measured are kept, so a sweep that was stopped goes on.
    """
    from .convert.calibrated import Calibration
    from .eval.tradeoff import COLUMNS, RESULTS_NAME, SweepRow, table_rows
    from .recipes.sweep import SweepSettings
    from .recipes.sweep import sweep as run_sweep

    settings = SweepSettings(
        _numbers(groups), methods.split(","), data, Calibration(calibration, calibration_tokens, device=device),
        refine, tokens, window,
    )  # fmt: skip
    page = run_sweep(checkpoint, out, settings)
    import json

    rows = [SweepRow(**row) for row in json.loads((out / RESULTS_NAME).read_text(encoding="utf-8"))["rows"]]
    console.table(f"{checkpoint} before uptraining", COLUMNS, table_rows(rows))
    console.result(page)


@app.command(epilog="Example: `headfold run demo -o demo`")
def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe such as demo.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the checkpoints and the report; runs/NAME by default."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Convert, uptrain and compare in a row, as a recipe says. Steps that are done already are skipped.

    The path of the report is the last line printed.
    """
    from .recipes.schema import load_recipe

    loaded = load_recipe(recipe)
    folder = out if out is not None else Path("runs") / Path(recipe).stem
    if dry_run:
        import yaml

        console.data.print(yaml.safe_dump(loaded.model_dump(), sort_keys=False), markup=False)
        return
    from .recipes.run import run_recipe

    console.result(run_recipe(loaded, folder))


@app.command(epilog="Example: `headfold report report -o report-again --fail-over 2%`")
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results.json, or the folder that holds it.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the report; none: print it only.")] = None,
    fail_over: Annotated[
        str | None, typer.Option(help="Exit with 1 when the last model's perplexity is worse by more, such as 2%.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Print the results of `headfold eval` again, write their report again, or let a build fail by them."""
    from .errors import HeadfoldError
    from .eval.report import final_loss, print_report, read_results, rebuild_report

    limit = None if fail_over is None else _share(fail_over)
    found = read_results(results) if out is None else rebuild_report(results, out, overwrite=overwrite)
    print_report(found)
    if out is not None:
        console.result(out / "report.html")
    loss = final_loss(found)
    if limit is not None and loss > limit:
        raise HeadfoldError(f"The perplexity is worse than the source's by {loss:.2%}, more than {limit:.2%}.")


def _share(text: str) -> float:
    """``2%`` or ``0.02``."""
    from .errors import UsageError

    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as problem:
        raise UsageError(f"{text!r} is no share.", "Write it as 2% or 0.02.") from problem
    return value


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script; always ends in SystemExit."""
    try:
        app(arguments)
    except HeadfoldError as problem:
        console.error(problem.message, problem.hint)
        sys.exit(problem.exit_code)
    except OSError as problem:
        console.error(f"{problem.filename or 'A file'} cannot be used: {problem.strerror or problem}.")
        sys.exit(1)
    except KeyboardInterrupt:
        console.error("Interrupted.")
        sys.exit(130)
