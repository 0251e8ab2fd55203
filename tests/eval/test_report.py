from __future__ import annotations

import copy
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from headfold.errors import DataError, UsageError
from headfold.eval.report import final_loss, html, markdown, print_report, read_results, rebuild_report, write_report
from headfold.eval.wording import change, number, percent, verdict


def estimate(value: float, spread: float = 0.1) -> dict[str, float]:
    return {"value": value, "low": value * (1 - spread), "high": value * (1 + spread)}


def model(name: str, role: str, perplexity: float, cache: int) -> dict:
    return {
        "name": name,
        "role": role,
        "path": name,
        "model_type": "llama",
        "parameters": 4_200_000,
        "weight_bytes": 8 * 2**20,
        "query_heads": 8,
        "kv_heads": [cache // 1024],
        "perplexity": estimate(perplexity),
        "bits_per_byte": estimate(1.234),
        "nll_nats": [1.0, 2.0],
        "cache_bytes_per_token": cache,
        "decode": [
            {
                "batch": batch,
                "context": 256,
                "new_tokens": 64,
                "tokens_per_second": {"median": 100.0 * batch, "min": 90.0, "max": 110.0},
                "first_token_seconds": {"median": 0.1, "min": 0.1, "max": 0.1},
            }
            for batch in (1, 8)
        ],
        "recovery": [],
    }


def pair(ratio: float) -> dict:
    speed = {"median": 1.5, "min": 1.4, "max": 1.6}
    return {
        "perplexity_ratio": estimate(ratio, 0.01),
        "kl_nats": estimate(0.321),
        "kl_percentiles": {"50": 0.1, "90": 0.5, "99": 1.0, "99.9": 2.0},
        "same_top_token": estimate(0.777, 0.01),
        "cache_ratio": 4.0,
        "speedup": [{"batch": batch, "decode": speed, "first_token": speed} for batch in (1, 8)],
        "by_context": [
            {"from": n, "to": 2 * n - 1, "tokens": 9, "source_nats": 3.0, "nats": 3.1} for n in (1, 2, 4, 8)
        ],
        "worst_documents": [
            {"name": "bad <b>.py", "tokens": 1234, "source_perplexity": 20.0, "perplexity": 31.0, "ratio": 1.55}
        ],
        "recovered": None,
    }


@pytest.fixture
def results() -> dict:
    source, converted, uptrained = (
        model("mha", "source", 28.71, 8192),
        model("gqa-2", "converted", 172.9, 2048),
        model("gqa-2-up", "uptrained", 35.43, 2048),
    )
    converted["against_source"], uptrained["against_source"] = pair(172.9 / 28.71), pair(35.43 / 28.71)
    uptrained["against_source"]["recovered"] = {**estimate(0.882, 0.01), "converted": "gqa-2"}
    uptrained["recovery"] = [{"tokens": 10_000.0 * n, "perplexity": 170.0 / (1 + n)} for n in range(4)]
    return {
        "schema": 1,
        "kind": "headfold.eval",
        "created": "2025-01-01T00:00:00+00:00",
        "command": "headfold eval mha gqa-2 gqa-2-up --data 'a & b'",
        "versions": {"python": "3.11.7", "headfold": "0.1.0"},
        "protocol": {
            "corpus": "stdlib#heldout",
            "revision": "CPython 3.11.7",
            "text_sha256": "ab" * 32,
            "ids_sha256": "cd" * 32,
            "documents": 2,
            "skipped": 1,
            "truncated": True,
            "tokens": 65_536,
            "utf8_bytes": 220_000,
            "window": 512,
            "stride": 256,
            "batch_size": 8,
            "bos": False,
            "dtype": "float32",
            "device": "cpu",
            "attention": "sdpa",
            "vocab": 4096,
            "uniform_perplexity": 4096.0,
            "interval": {"method": "BCa bootstrap over documents", "level": 0.95, "resamples": 2000, "seed": 0},
            "decode": {"batches": [1, 8], "context": 256, "new_tokens": 64, "repeats": 3},
        },
        "documents": [{"name": "a", "tokens": 1, "utf8_bytes": 3}, {"name": "b", "tokens": 1, "utf8_bytes": 3}],
        "models": [source, converted, uptrained],
    }


class Page(HTMLParser):
    """What a browser would fetch, the text it would show, and what is not closed."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.spoken: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.fetched += [named[key] for key in ("src", "href", "data", "poster", "action") if named.get(key)]
        self.ids += [named["id"]] if "id" in named else []
        if named.get("role") == "img":
            self.spoken.append(named["aria-label"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_is_whole_and_loads_nothing(results):
    page = html(results)
    parsed = Page(page)
    assert parsed.open == []
    assert page.count("<svg") == 3
    assert all(target.startswith("#") for target in parsed.fetched)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert {target[1:] for target in parsed.fetched} <= set(parsed.ids)
    assert len(parsed.spoken) == 3
    assert "28.71" in parsed.spoken[0]
    assert "prefers-color-scheme: dark" in page
    assert "viewport" in page


def test_page_shows_the_numbers_of_the_results(results):
    text = Page(html(results)).text.replace("\u00a0", " ")
    for shown in (
        "28.71",
        "172.9",
        "35.43",
        "1.234",
        "0.3210",
        "77.7 %",
        "8.00 KiB",
        "2.00 KiB",
        "4.00× smaller",
        "800.0",
    ):
        assert shown in text, shown
    for shown in (
        "[25.84, 31.58]",
        "+23.4 %",
        "+502.2 %",
        "88 %",
        "65,536 tokens",
        "abababab",
        "CPython 3.11.7",
        "4,096",
    ):
        assert shown in text, shown
    assert "headfold eval mha gqa-2 gqa-2-up --data 'a & b'" in text
    assert "bad <b>.py" in text  # a name is text, never markup
    results["models"][2]["perplexity"]["value"] = 36.66
    assert "36.66" in Page(html(results)).text


def test_no_record_no_recovery_plot(results):
    results["models"][2]["recovery"] = []
    page = html(results)
    assert page.count("<svg") == 2
    assert "No plot of recovery" in page


def test_markdown_has_the_same_cells(results):
    results["models"][1]["name"] = "a|b"
    text = markdown(results)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert all(re.sub(r"\\\|", "", line).count("|") == 5 for line in table)
    assert "35.43 [31.89, 38.97]" in text
    assert results["command"] in text


def test_verdict_is_about_the_last_model(results):
    said = verdict(results)
    assert said.startswith(
        "gqa-2-up: perplexity +23.4 % [+22.2, +24.6 %] against the source, with a KV cache 4 times smaller"
    )
    assert "1.50× the speed (batch 8)" in said
    assert "won back 88 % [87, 89 %] of the log-perplexity that gqa-2 had lost" in said
    alone = copy.deepcopy(results)
    del alone["models"][1:]
    assert verdict(alone) == "mha has a perplexity of 28.71 [25.84, 31.58]."
    assert html(alone)


def test_the_loss_that_counts_is_that_of_the_last_model(results):
    last = results["models"][-1]["against_source"]["perplexity_ratio"]["value"]
    assert final_loss(results) == pytest.approx(last - 1)
    assert final_loss(results) != pytest.approx(results["models"][1]["against_source"]["perplexity_ratio"]["value"] - 1)
    results["models"] = results["models"][:1]
    assert final_loss(results) == 0


def test_rebuild_gives_the_same_files(results, tmp_path):
    (tmp_path / "one").mkdir()
    write_report(results, tmp_path / "one")
    assert rebuild_report(tmp_path / "one", tmp_path / "two") == results
    for name in ("results.json", "report.md", "report.html"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_results_that_cannot_be_read(tmp_path, results):
    with pytest.raises(UsageError):
        read_results(tmp_path / "nowhere")
    for content in ("{", "[]", json.dumps({"kind": "other"}), json.dumps({**results, "schema": 99})):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(DataError):
            read_results(tmp_path)


def test_table_on_stdout(results, capsys):
    print_report(results)
    out = capsys.readouterr().out
    assert "35.43" in out
    assert "gqa-2-up: perplexity" in out


def test_numbers_in_words():
    assert [number(value) for value in (28.714, 244.31, 12345.6, 0.01234, 0.0, None, math.nan)] == [
        "28.71",
        "244.3",
        "12,346",
        "0.0123",
        "0.000",
        "–",
        "–",
    ]
    assert [change(1.031), change(0.95), change(None)] == ["+3.1 %", "−5.0 %", "–"]
    assert percent(0.8154) == "81.5 %"


@pytest.mark.parametrize("width", [1280, 500])
def test_page_in_chromium(results, tmp_path, width):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Debian's chromium is not installed")
    (tmp_path / "report.html").write_text(
        html(results).replace(
            "</main>",
            "</main><script>document.title = JSON.stringify({wide: document.documentElement.scrollWidth, "
            "inner: innerWidth, plots: [...document.querySelectorAll('figure svg')].map("
            "svg => [svg.getBoundingClientRect().width, svg.getBoundingClientRect().height])})</script>",
        )
    )
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},900"]
    done = subprocess.run(
        [
            chromium,
            *switches,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (tmp_path / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    seen = json.loads(re.search(r"<title>(.*?)</title>", done.stdout).group(1))
    assert seen["wide"] <= seen["inner"]  # nothing makes the page scroll sideways
    assert len(seen["plots"]) == 3
    assert all(wide > 250 and high > 80 for wide, high in seen["plots"])
