from __future__ import annotations

import functools
import json
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from headfold.errors import DataError, HeadfoldError, UsageError
from headfold.eval.report.format import change, number, percent
from headfold.eval.report.merge import read_and_merge
from headfold.eval.report.verdict import refuse_loss, verdict
from headfold.eval.report.write import html, markdown, print_report, rebuild_report, write_report
from headfold.eval.results import Comparison, read_results


def estimate(value: float, spread: float = 0.1) -> dict[str, float]:
    return {"value": value, "low": value * (1 - spread), "high": value * (1 + spread)}


PLOTS = 7
"""All plots but the sweep's curve, and time against groups, which needs three numbers of KV heads."""
POINTS = [(context, batch) for context in (64, 256) for batch in (1, 8)]


def model(name: str, role: str, perplexity: float, cache: int) -> dict:
    return {
        "name": name,
        "role": role,
        "path": name,
        "digest": name,
        "model_type": "llama",
        "parameters": 4_200_000,
        "weight_bytes": 8 * 2**20,
        "query_heads": 8,
        "kv_heads": [cache // 1024],
        "perplexity": estimate(perplexity),
        "bits_per_byte": estimate(1.234),
        "nll_nats": [1.0, 2.0],
        "cache_bytes_per_token": cache,
        "cache_formula_bytes": cache,
        "capacity": {
            "memory_bytes": 24 * 10**9,
            "batches": [{"context": 512, "batch": 31}, {"context": 2048, "batch": 7}],
            "tokens": 123_456,
        },
        "decode": [
            {
                "context": context,
                "batch": batch,
                "new_tokens": 32,
                "tokens_per_second": {"median": 100.0 * batch - context / 8, "min": 60.0, "max": 110.0 * batch},
                "first_token_seconds": {"median": 0.123, "min": 0.1, "max": 0.2},
                "peak_bytes": (8 + context * batch * cache // 2**20) * 2**20,
            }
            for context, batch in POINTS
        ],
        "needle": [
            {
                "length": length,
                "gain_nats": estimate(0.654),
                "gain_by_depth": [0.1, 0.2, 0.3, 0.6, 1.2],
                "found_by_depth": [0.3, 0.3, 0.4, 0.5, 0.7],
            }
            for length in (128, 512)
        ],
        "tasks": [
            {
                "task": "hellaswag",
                "measure": "acc",
                "higher_is_better": True,
                "questions": 100,
                "mean": estimate(0.512),
                "standard_error": 0.049,
            }
        ],
        "recovery": [],
    }


def pair(ratio: float) -> dict:
    speed = {"median": 1.5, "min": 1.4, "max": 1.6}
    edges = [10 ** (quarter / 4) for quarter in range(-24, 7)]
    shares = [math.exp(-((place - 18) ** 2) / 40) / 11 for place in range(len(edges) - 1)]
    return {
        "perplexity_ratio": estimate(ratio, 0.01),
        "kl_nats": estimate(0.321),
        "kl_percentiles": {"50": 0.1, "90": 0.5, "99": 1.0, "99.9": 2.0},
        "kl_histogram": {"edges": edges, "shares": shares},
        "same_top_token": estimate(0.777, 0.01),
        "cache_ratio": 4.0,
        "speedup": [
            {"context": context, "batch": batch, "decode": speed, "first_token": speed} for context, batch in POINTS
        ],
        "by_context": [
            {"from": n, "to": 2 * n - 1, "tokens": 9, "source_nats": 3.0, "nats": 3.1} for n in (1, 2, 4, 8)
        ],
        "worst_documents": [
            {"name": "bad <b>.py", "tokens": 1234, "source_perplexity": 20.0, "perplexity": 31.0, "ratio": 1.55}
        ],
        "worst_tokens": [
            {
                "document": "bad <b>.py",
                "place": 17,
                "before": "def <i>read(self,",
                "token": " size",
                "source_probability": 0.4321,
                "probability": 0.000987,
                "lost_nats": 6.1,
            }
        ],
        "needle": [{"length": length, "gain_difference_nats": estimate(-0.1)} for length in (128, 512)],
        "tasks": [{"task": "hellaswag", "measure": "acc", "difference": estimate(-0.031)}],
        "recovered": None,
    }


@pytest.fixture
def content() -> dict:
    """The content of a results.json."""
    source, converted, uptrained = (
        model("mha", "source", 28.71, 8192),
        model("gqa-2", "converted", 172.9, 2048),
        model("gqa-2-up", "uptrained", 35.43, 2048),
    )
    converted["against_source"], uptrained["against_source"] = pair(172.9 / 28.71), pair(35.43 / 28.71)
    uptrained["against_source"]["recovered"] = {**estimate(0.882, 0.01), "converted": "gqa-2"}
    uptrained["recovery"] = [{"tokens": 10_000.0 * n, "perplexity": 170.0 / (1 + n)} for n in range(4)]
    return {
        "schema": 2,
        "kind": "headfold.eval",
        "created": "2025-01-01T00:00:00+00:00",
        "command": "headfold eval mha gqa-2 gqa-2-up --data 'a & b'",
        "settings": {},
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
            "processes": 1,
            "source_from_cache": False,
            "attention": "sdpa",
            "vocab": 4096,
            "uniform_perplexity": 4096.0,
            "interval": {"method": "BCa bootstrap over documents", "level": 0.95, "resamples": 2000, "seed": 0},
            "decode": {"batches": [1, 8], "contexts": [64, 256], "new_tokens": 32, "repeats": 3},
            "needle": {"passages": 8, "lengths": [128, 512], "depths": [0.0, 0.25, 0.5, 0.75, 1.0]},
        },
        "documents": [{"name": "a", "tokens": 1, "utf8_bytes": 3}, {"name": "b", "tokens": 1, "utf8_bytes": 3}],
        "models": [source, converted, uptrained],
    }


@pytest.fixture
def results(content) -> Comparison:
    return Comparison.model_validate(content)


class Page(HTMLParser):
    """Collects what a browser would fetch, the text it would show, and tags that are not closed."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.alt_texts: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.fetched += [named[key] for key in ("src", "href", "data", "poster", "action") if named.get(key)]
        self.ids += [named["id"]] if "id" in named else []
        if named.get("role") == "img":
            self.alt_texts.append(named["aria-label"])
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
    assert page.count("<svg") == PLOTS
    assert all(target.startswith("#") for target in parsed.fetched)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert {target[1:] for target in parsed.fetched} <= set(parsed.ids)
    assert len(parsed.alt_texts) == PLOTS
    assert "28.71" in parsed.alt_texts[0]
    assert "prefers-color-scheme: dark" in page
    assert "viewport" in page


def test_page_shows_the_numbers_of_the_results(results, content):
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
        "768.0",
        "+0.6540",
        "0.512 ± 0.049",
        "123 ms",
        "Fits into 24 GB",
        "123 k tokens",
        "7 sequences of 2,048",
        "43.2 %",
        "0.099 %",
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
    assert "def <i>read(self, size" in text
    content["models"][2]["perplexity"]["value"] = 36.66
    assert "36.66" in Page(html(Comparison.model_validate(content))).text


def test_without_a_record_there_is_no_recovery_plot(content):
    content["models"][2]["recovery"] = []
    page = html(Comparison.model_validate(content))
    assert page.count("<svg") == PLOTS - 1
    assert "No plot of recovery" in page


def test_markdown_has_the_same_cells(content):
    content["models"][1]["name"] = "a|b"
    text = markdown(Comparison.model_validate(content))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert all(re.sub(r"\\\|", "", line).count("|") == 5 for line in table)
    assert "35.43 [31.89, 38.97]" in text
    assert content["command"] in text


def test_verdict_is_about_the_last_model(results):
    said = verdict(results)
    assert said.startswith(
        "gqa-2-up: perplexity +23.4 % [+22.2, +24.6 %] against the source, with a KV cache 4 times smaller"
    )
    assert "recovered 88 % [87, 89 %] of the log-perplexity that gqa-2 had lost" in said
    alone = results.model_copy(update={"models": results.models[:1]})
    assert verdict(alone) == "mha has a perplexity of 28.71 [25.84, 31.58]."
    assert html(alone)


def with_ratio(content: dict, value: float | None, low: float | None, high: float | None) -> Comparison:
    content["models"][-1]["against_source"]["perplexity_ratio"] = {"value": value, "low": low, "high": high}
    return Comparison.model_validate(content)


def test_a_loss_is_judged_by_the_upper_end_of_its_interval(content):
    """A loss of 1 % with an interval up to 3 % passed a limit of 2 %."""
    results = with_ratio(content, 1.01, 0.99, 1.03)
    with pytest.raises(HeadfoldError, match=r"may be worse than the source's by 3\.00%, more than 2\.00%"):
        refuse_loss(results, 0.02, "bound")
    refuse_loss(results, 0.02, "point")
    refuse_loss(results, 0.031, "bound")
    with pytest.raises(HeadfoldError, match=r"by 1\.00%, more than 0\.50%"):
        refuse_loss(results, 0.005, "point")


def test_a_loss_without_an_interval_fails_unless_judged_by_the_point(content):
    results = with_ratio(content, 1.001, None, None)
    with pytest.raises(HeadfoldError, match="there is no interval") as problem:
        refuse_loss(results, 0.02, "bound")
    assert "2 documents" in str(problem.value)
    assert "--fail-by point" in problem.value.hint
    refuse_loss(results, 0.02, "point")


@pytest.mark.parametrize("by", ["bound", "point"])
def test_a_perplexity_beyond_any_float_fails(content, by):
    with pytest.raises(HeadfoldError):
        refuse_loss(with_ratio(content, None, None, None), 10.0, by)


def test_an_upper_end_beyond_any_float_fails(content):
    with pytest.raises(HeadfoldError):
        refuse_loss(with_ratio(content, 1.01, 0.5, None), 10.0, "bound")


def test_a_source_alone_cannot_be_judged(results):
    with pytest.raises(UsageError):
        refuse_loss(results.model_copy(update={"models": results.models[:1]}), 0.02, "bound")


def test_headline_has_the_range_of_the_speed(content):
    speed = content["models"][-1]["against_source"]["speedup"][-1]["decode"]
    said = verdict(Comparison.model_validate(content))
    assert "1.50× (1.40 to 1.60) the speed (batch 8)" in said  # a file of schema 2
    speed.update(low=1.38, high=1.62)
    results = Comparison.model_validate(content)
    assert "decoding at 1.50× [1.38, 1.62] the speed (batch 8)" in verdict(results)
    assert "1.50× [1.38, 1.62]" in Page(html(results)).text
    assert "1.50× [1.38, 1.62]" in markdown(results)
    speed.update(low=0.97, high=1.62)
    assert "1.50× [0.97, 1.62] the speed, which may be the same (batch 8)" in verdict(
        Comparison.model_validate(content)
    )


def test_a_recovered_share_that_is_not_defined_says_why(content, capsys):
    reason = "it is not certain that gqa-2 lost anything on this text: its interval reaches zero"
    missing = {"value": None, "low": None, "high": None, "converted": "gqa-2", "missing": reason}
    content["models"][-1]["against_source"]["recovered"] = missing
    results = Comparison.model_validate(content)
    assert f"There is no recovered share: {reason}." in verdict(results)
    assert "recovered 88" not in verdict(results)
    text = Page(html(results)).text
    assert reason in text
    assert "of the loss recovered" not in text
    assert "not defined" in markdown(results)


def test_effective_number_of_documents_stands_beside_the_numbers(content, capsys):
    content["protocol"].update(documents=20, effective_documents=8.05)
    content["protocol"]["interval"].update(method="studentised", fewest_documents=5, fewest_effective=2.0)
    results = Comparison.model_validate(content)
    print_report(results)
    assert "20 documents, effective number 8.1" in " ".join(capsys.readouterr().out.split())
    for text in (Page(html(results)).text, markdown(results)):
        assert "20 documents of unequal length that tell as much as 8.1 equal ones" in text
        assert "95 %, studentised, 2,000 draws, paired" in text


def test_missing_intervals_say_what_would_be_enough(content):
    content["protocol"].update(documents=1, effective_documents=1.0)
    content["protocol"]["interval"].update(fewest_documents=5, fewest_effective=2.0)
    results = with_ratio(content, 1.02, None, None)
    enough = "1 document, effective number 1.0; an interval needs at least 5 documents and an effective number of 2"
    assert f"none: {enough}" in markdown(results)
    assert f"No intervals: {enough}." in verdict(results)


def test_rebuild_gives_the_same_files(results, tmp_path):
    (tmp_path / "one").mkdir()
    write_report(results, tmp_path / "one")
    rebuild_report(read_and_merge([tmp_path / "one"]), tmp_path / "two")
    for name in ("results.json", "report.md", "report.html"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_results_that_cannot_be_read_are_refused(tmp_path, content):
    with pytest.raises(UsageError):
        read_results(tmp_path / "nowhere")
    without_documents = {key: found for key, found in content.items() if key != "documents"}
    for text, message in (
        ("{", "not valid JSON"),
        ("[]", "does not hold the results"),
        (json.dumps({"kind": "other"}), "does not hold the results"),
        (json.dumps({**content, "schema": 99}), "has schema 99, this headfold reads 2 and 3"),
        (json.dumps(without_documents), "documents: Field required"),
        (json.dumps({**content, "xyzzy": 1}), "xyzzy: Extra inputs"),
    ):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(DataError, match=message):
            read_results(tmp_path)


def test_results_keep_the_layout_of_the_file(content, results):
    """Keys that do not apply stay away, and a number that was not measured stays null."""
    assert json.loads(results.to_json()) == content
    assert "against_source" not in content["models"][0]
    assert list(json.loads(results.to_json())["models"][1]["against_source"]["by_context"][0])[:2] == ["from", "to"]


def test_table_on_stdout(results, capsys):
    print_report(results)
    out = capsys.readouterr().out
    assert "35.43" in out
    assert "gqa-2-up: perplexity" in out


def test_numbers_are_written_for_people():
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


def test_time_against_kv_heads_is_plotted_from_three_numbers_on(content):
    content["models"][2]["kv_heads"] = [1]
    page = html(Comparison.model_validate(content))
    assert page.count("<svg") == PLOTS + 1
    assert "Milliseconds per decoded token: 1 head" in page


def test_a_source_from_the_cache_has_no_kl(content):
    content["protocol"]["source_from_cache"] = True
    content["models"][0]["decode"] = []
    for found in content["models"][1:]:
        found["against_source"].update(kl_nats=None, kl_histogram=None, kl_percentiles=None, speedup=[])
    results = Comparison.model_validate(content)
    text = Page(html(results)).text
    assert "KL to the source" not in text
    assert "no KL and no speed against it" in text
    assert "768.0" in text
    assert markdown(results)


def test_every_cell_says_its_column_where_the_page_is_narrow(results):
    """Below 560 pixels a table shows a block per row, and each cell names its model."""
    page = html(results)
    cells = re.findall(r"<td[^>]*>", page)
    assert len(cells) > 50
    assert all('data-label="' in cell for cell in cells)
    assert page.count("<table") == len(re.findall(r'<table class="[^"]*stack', page))
    narrow = page[page.index("@media (max-width: 560px)") :]
    assert "content: attr(data-label)" in narrow[: narrow.index("@media print")]


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
SEEN = r"""
document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth,
  inner: innerWidth,
  fetched: performance.getEntriesByType('resource').length,
  // how far tables can be scrolled sideways, and words that stand on more than one line
  scrolled: Math.max(...[...document.querySelectorAll('.scroll')].map(box => box.scrollWidth - box.clientWidth)),
  broken: (() => {
    const found = [], walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode());) {
      if (node.parentElement.closest('svg, script, pre, dl, [hidden]')) continue;
      for (const word of node.data.matchAll(/[^\s\u00a0\/,_=-]+/g)) {
        const range = document.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) found.push(word[0]);
      }
    }
    return found;
  })(),
  background: getComputedStyle(document.body).backgroundColor,
  plots: [...document.querySelectorAll('figure svg')].map(svg => {
    const box = svg.getBoundingClientRect();
    const inside = [...svg.querySelectorAll('text')].every(text => {
      const own = text.getBoundingClientRect();
      return own.left >= box.left - 1 && own.right <= box.right + 1 && own.bottom <= box.bottom + 1;
    });
    const strokes = [...svg.querySelectorAll('path')].map(path => getComputedStyle(path).stroke);
    return [box.left, box.right, box.height, inside, strokes.filter(stroke => stroke.startsWith('rgb'))];
  }),
});
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_in_chromium(results, tmp_path, theme):
    """At 1280 and at 390 pixels all plots lie within the page, nothing is fetched, and the console stays empty."""
    for width in (1280, 390):
        seen = open_page(html(results), tmp_path, width, theme)
        assert seen["fetched"] == 0
        assert seen["inner"] == width
        assert seen["wide"] <= width  # nothing makes the page scroll sideways
        assert seen["scrolled"] <= 0
        assert seen["broken"] == []
        assert seen["background"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 27)"}[theme]
        assert len(seen["plots"]) == PLOTS
        for left, right, height, inside, colours in seen["plots"]:
            assert 0 <= left < left + 250 < right <= width
            assert height > 80
            assert inside  # no label is cut off
            assert len(set(colours)) > 2  # grid, axis, and at least one curve
            assert seen["background"] not in colours  # a curve of the page's own colour would be invisible


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium")
def test_the_browser_test_notices_fetching_and_wide_pages(results, tmp_path):
    """The control: a page that fetches, and one that is too wide."""
    page = html(results)
    fetching = page.replace("</main>", "<img src='nowhere.png' alt=''></main>")
    assert open_page(fetching, tmp_path, 390, "light")["fetched"] == 1
    wide = page.replace("</main>", "<div style='width: 900px'>wide</div></main>")
    assert open_page(wide, tmp_path, 390, "light")["wide"] > 390


def open_page(page: str, folder: Path, width: int, theme: str) -> dict:
    """Measure the page inside headless Chromium. Its window cannot be narrower than 500 pixels, so the page
    is shown in a frame of the wanted width, and its own console is watched."""
    inner = page.replace(
        "</main>",
        f"</main><script>addEventListener('load', () => {{{SEEN}; parent.postMessage(document.title, '*')}})</script>",
    )
    (folder / "page.html").write_text(inner)
    frame = (
        "<!DOCTYPE html><body style='margin:0'>"
        "<script>addEventListener('message', told => {document.title = told.data})</script>"
        f"<iframe src='page.html' style='border:0;width:{width}px;height:900px'></iframe>"
    )
    (folder / "frame.html").write_text(frame)
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars"]
    themes = {"light": "1", "dark": "0"}  # of blink's preferredColorScheme
    command = [CHROMIUM, *switches, f"--window-size={width + 20},950", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={themes[theme]}", "--dump-dom"]
    with serving(folder) as address:
        done = subprocess.run(
            [*command, f"{address}/frame.html"], capture_output=True, text=True, timeout=200, check=True
        )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "nowhere.png" not in line]
    assert console == []
    found: dict = json.loads(re.search(r"<title>(.*?)</title>", done.stdout).group(1))
    return found


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the folder over HTTP, since a browser does not record what it fetches from files."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass
