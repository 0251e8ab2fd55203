"""Conversions with text as the tests write them down: a plan first, its text later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headfold.convert.plan import Plan
from headfold.convert.run import run_plan
from headfold.convert.settings import ConvertSettings


def calibration_text(data: str | None = "stdlib", tokens: int | None = None, **fields: Any) -> dict[str, Any]:
    named = {"calibration": data, "calibration_tokens": tokens, **fields}
    return {name: value for name, value in named.items() if value is not None}


def with_text(plan: Plan, text: dict[str, Any], **fields: Any) -> Plan:
    """The plan with settings for calibration text; method and grouping are the plan's."""
    kept = {
        "groups": plan.groups,
        "method": plan.method_name,
        "grouping": plan.grouping,
        "encoder": plan.settings.encoder,
    }
    return replace(plan, settings=ConvertSettings(**{**kept, **text, **fields}))


def convert_calibrated(plan: Plan, out: Path, text: dict[str, Any], **options: Any) -> Path:
    return run_plan(with_text(plan, text), out, **options)
