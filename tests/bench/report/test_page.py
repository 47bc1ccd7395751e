"""The page, as a person's browser shows it: headless Chromium, driven by Playwright."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from samples import MACHINE, measurement, record, records_of

from bench.analysis.scoreboard import Scoreboard, scoreboard
from bench.analysis.select import load_boards
from bench.analysis.turns import Turns
from bench.records.published import read_published
from bench.report.assembly import assemble
from bench.report.page import page
from bench.stats import Estimate
from gpt2.config.toggles import Toggles

CUDA = Toggles(device="cuda")
BF16 = replace(CUDA, autocast="bfloat16")
HOSTILE = '</script><script>window.hit=1</script><img src=x onerror="window.hit=2"> & "quoted"'


def board(machine: str = "NVIDIA H100 80GB HBM3", factor: float = 1.0) -> Scoreboard:
    environment = MACHINE.model_copy(update={"chip": machine})
    records = []
    for n, (name, toggles, tps) in enumerate((("baseline", CUDA, 1000.0), (HOSTILE, BF16, 21000.0))):
        for r in (1, 2, 3):
            found = measurement(tps * factor * (1 + r / 100))
            records.append(record(name, n, r, toggles=toggles, measurement=found, environment=environment))
    return scoreboard(records)


@pytest.fixture(scope="module")
def text() -> str:
    figures = read_published(ROOT / "results" / "published" / "jjschwartz-2024.jsonl")
    return page(assemble([board(), board("NVIDIA H200", 1.2)], figures))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if chromium is None:
        pytest.skip("no Chromium is installed")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=chromium, args=quiet)


@pytest.fixture
def shown(browser: Any, text: str, tmp_path: Path) -> Iterator[Any]:
    """The page at a phone's width, with what it said on the console and asked of the network."""
    file = tmp_path / "index.html"
    file.write_text(text, encoding="utf-8")
    tab = browser.new_page(viewport={"width": 390, "height": 800})
    tab.said, tab.asked = [], []
    tab.on("console", lambda message: tab.said.append(message.text))
    tab.on("pageerror", lambda error: tab.said.append(str(error)))
    tab.on("request", lambda request: tab.asked.append(request.url))
    tab.goto(file.as_uri())
    yield tab
    tab.close()


def test_it_loads_without_an_error_and_asks_nothing_of_the_network(shown: Any) -> None:
    assert shown.said == []
    assert [url for url in shown.asked if not url.startswith("file:")] == []


def test_no_text_of_a_results_file_runs_or_becomes_markup(shown: Any, text: str) -> None:
    assert shown.evaluate("window.hit") is None
    assert shown.locator("main img").count() == 0
    assert shown.locator("#runs tbody th", has_text=HOSTILE).count() > 0
    assert text.count("<script") == 2


def test_no_control_character_reaches_the_page() -> None:
    foul = "\x1b[31ma\x07\x00"
    environment = MACHINE.model_copy(update={"chip": foul, "torch": foul})
    rungs = [(f"{foul}{n}", replace(CUDA, micro_batch_size=n), 1e3) for n in (1, 2)]
    run = scoreboard(records_of(*rungs, ladder=foul, environment=environment))
    text = page(assemble([run] * 2))
    assert not re.search("[\x00-\x08\x0b-\x1f]", text)


def test_the_first_screen_of_a_phone_shows_the_answer_and_the_climb_s_beginning(shown: Any) -> None:
    figures = shown.locator("#answer b").all_inner_texts()
    assert figures[:2] == ["25,703 tokens/s", "21.00x"]
    first = shown.locator("#climbed [role=button]").first
    assert first.bounding_box()["y"] + first.bounding_box()["height"] < 800


def test_choosing_another_run_shows_its_answer(shown: Any) -> None:
    options = shown.locator("#run option").all_inner_texts()
    assert options == ["h100 · 1 x NVIDIA H100 80GB HBM3", "h100 · 1 x NVIDIA H200"]
    shown.select_option("#run", label=options[0])
    assert shown.inner_text("#answer b >> nth=0") == "21,419 tokens/s"


def test_a_faster_run_of_the_same_machine_is_named_and_a_click_away(browser: Any, tmp_path: Path) -> None:
    slow = scoreboard(records_of(("slow", CUDA, 1000.0), ("fused", BF16, 1500.0), ladder="slow", rounds=3))
    fast = scoreboard(records_of(("quick", BF16, 2000.0), ladder="fast"))
    file = tmp_path / "index.html"
    file.write_text(page(assemble([slow, fast], [])), encoding="utf-8")
    with browser.new_page() as tab:
        tab.goto(file.as_uri())
        said = "Most tokens per second on this machine: quick, 2,000 tokens/s (1 round), in fast."
        assert tab.locator("#findings li").nth(1).inner_text() == said
        tab.focus("#findings a")
        tab.keyboard.press("Enter")
        assert tab.locator(".answer b").first.inner_text() == "2,000 tokens/s"
        assert tab.evaluate("document.activeElement.id") == "tab-climb"
        assert "on this machine: " not in tab.inner_text("#findings")
        tab.click("#tab-machines")
        assert tab.locator("#compared-machines g text").nth(1).text_content() == "2,000, quick (1 round)"


def test_the_climb_s_figures_are_those_of_the_full_table(shown: Any) -> None:
    table = assemble([board(), board("NVIDIA H200", 1.2)]).runs[1][0]
    titles = ("TPS", "Over rung before", "Peak memory (GiB)")
    wanted = [[row[table.head.index(title)] for title in titles] for row in table.cells]
    figures = [row["figures"] for row in shown.evaluate("run.rows")]
    assert [
        [row["tokens/s"], row.get("over the rung before", "-"), row["peak memory"].removesuffix(" GiB")]
        for row in figures
    ] == wanted


def test_pointing_at_a_rung_tells_its_interval_memory_and_loss(shown: Any) -> None:
    shown.locator("#climbed [role=button]").nth(1).focus()
    said = shown.inner_text("#said")
    assert "tokens/s 25,703 ±" in said
    assert "peak memory 3.00 GiB" in said
    assert "loss at step" in said


def test_a_rung_chosen_by_the_keyboard_shows_what_changed_and_its_command(shown: Any) -> None:
    shown.locator("#climbed [role=button]").nth(1).focus()
    shown.keyboard.press("Enter")
    said = shown.inner_text("#rung")
    assert "autocast=bfloat16" in said
    assert "Seconds of each block" in said
    assert "python -m bench.worker" in said


def test_arrow_keys_go_from_tab_to_tab(shown: Any) -> None:
    shown.locator("#tab-climb").focus()
    shown.keyboard.press("ArrowRight")
    assert shown.locator("[role=tab][aria-selected=true]").inner_text() == "Compare machines"
    assert shown.locator("[role=tabpanel]:visible").count() == 1


def test_each_tab_draws_its_charts_when_it_is_first_shown(shown: Any) -> None:
    assert shown.locator("#compared-machines svg").count() == 0
    shown.click("#tab-machines")
    assert shown.locator("#compared-machines svg.chart").count() == 1


def test_published_bars_are_labelled_and_drawn_otherwise_than_measured_ones(shown: Any) -> None:
    shown.click("#tab-machines")
    bars = shown.locator("#compared-machines g[aria-label]")
    for at in range(bars.count()):
        published = "published" in bars.nth(at).get_attribute("aria-label")
        assert bars.nth(at).locator("rect.open").count() == published
    assert shown.locator("#compared-machines rect.open").count() > 0
    assert shown.locator("#compared-machines rect.bar").count() == 2


def test_published_bars_name_hardware_and_model_where_these_differ_within_a_series(
    shown: Any,
) -> None:
    shown.click("#tab-published")
    bars = shown.locator("#others g[aria-label]")
    said = {bar.get_attribute("aria-label") for bar in bars.all()}
    assert "Hardware: MPS: 1,149 on M3 laptop MPS, published" in said
    assert "batch of 64: 349,179, published" in said
    assert any(text.endswith(": 320,000, gpt2-xl, published") for text in said)


def test_the_bar_of_a_machine_leads_to_its_climb(shown: Any) -> None:
    shown.click("#tab-machines")
    shown.locator("#compared-machines [role=button]", has_text="NVIDIA H100").click()
    assert shown.locator("[role=tab][aria-selected=true]").inner_text() == "Climb"
    assert shown.inner_text("#answer b >> nth=0") == "21,419 tokens/s"
    assert shown.locator("#run option:checked").inner_text() == "h100 · 1 x NVIDIA H100 80GB HBM3"


def test_tables_over_all_runs_are_folded_until_they_are_opened_or_printed(shown: Any) -> None:
    shown.click("#tab-machines")
    tables = shown.locator("#machines table.sortable")
    assert tables.count() > 0
    assert shown.locator("#machines table.sortable:visible").count() == 0
    shown.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert shown.locator("#machines table.sortable:visible").count() == tables.count()


def test_a_run_without_other_trainers_says_so(shown: Any) -> None:
    shown.click("#tab-trainers")
    said = shown.inner_text("#beside").strip()
    assert said == "No other trainer was measured on this machine with this model."


def test_other_trainers_are_shown_of_another_run_on_the_same_machine(browser: Any, tmp_path: Path) -> None:
    folder = ROOT / "results" / "amd-epyc-26-2-1-x2"
    runs = [folder / "cpu-20261125T050205Z.jsonl", folder / "peers-cpu-20261125T065132Z.jsonl"]
    file = tmp_path / "index.html"
    file.write_text(page(assemble(load_boards(runs)[0], [])), encoding="utf-8")
    with browser.new_page() as tab:
        tab.goto(file.as_uri())
        assert tab.locator("#run option:checked").inner_text().startswith("cpu ")
        tab.click("#tab-trainers")
        assert "peers-cpu on amd-epyc-26-2-1-x2" in tab.inner_text("#beside")
        assert tab.locator("#beside rect.other").count() > 3


def test_trainers_that_took_turns_with_ours_are_shown_on_their_machine_and_lead_there(
    browser: Any, tmp_path: Path
) -> None:
    boards = [board(), board("NVIDIA H200")]
    model, length, *_ = boards[1].task
    ratio = Estimate(1.5, 1.4, 1.6, 3)
    found = Turns(
        source=Path("results/turns-peers-1.json"),
        ladder="peers",
        task=None,
        environment=boards[1].environment,
        time=datetime(2026, 11, 25, tzinfo=UTC),
        trainer=HOSTILE,
        version="1",
        ours="ours",
        starts=3,
        tokens_per_second=Estimate(100.0, None, None, 3),
        ours_tokens_per_second=Estimate(150.0, None, None, 3),
        ratio=ratio,
        verdict="faster",
        noise_floor=0.01,
    )
    other_model = replace(found, source=Path("results/turns-peers-2.json"), task=(f"{model}-other", length))
    file = tmp_path / "index.html"
    file.write_text(page(assemble(boards, turns=[found, other_model])), encoding="utf-8")
    with browser.new_page() as tab:
        tab.goto(file.as_uri())
        tab.select_option("#run", "0")
        tab.click("#tab-trainers")
        assert tab.locator("#beside svg").count() == 0
        tab.click("#beside button")
        tab.click("#tab-trainers")
        (says,) = [bar.get_attribute("aria-label") for bar in tab.locator("#beside g[aria-label]").all()]
        assert says == f"{HOSTILE}: 1.50x ±7 % faster; 150 against 100"
        assert tab.evaluate("window.hit") is None


def test_the_address_names_the_tab_and_the_run_so_that_a_link_leads_to_both(shown: Any) -> None:
    shown.select_option("#run", "0")
    shown.click("#tab-attribution")
    address, heading = shown.url, shown.inner_text("#attributed h2")
    shown.goto("about:blank")
    shown.goto(address)
    assert shown.locator("[role=tab][aria-selected=true]").inner_text() == "Attribution"
    assert shown.inner_text("#attributed h2") == heading
    assert shown.locator("#run option:checked").get_attribute("value") == "0"


def test_changes_that_were_not_measured_alone_are_shown_in_the_ladder_s_order(shown: Any) -> None:
    shown.click("#tab-attribution")
    assert "bench run --ablate" in shown.inner_text("#attributed")
    (label,) = [each.get_attribute("aria-label") for each in shown.locator("#attributed g[role=img]").all()]
    assert "21.00x" in label


def test_times_sort_by_their_length_and_not_by_their_figure(shown: Any) -> None:
    cells = (
        "cell => { const made = document.createElement('td'); made.textContent = cell; return value(made); }"
    )
    found = shown.evaluate(f"['33.5 s', '80 min', '1.7 h', '2.5 days', '456 ±2.7%', '-'].map({cells})")
    assert found == [33.5, 4800, 6120, 216000, 456, None]


def test_no_sorting_puts_published_rows_among_measured_ones(shown: Any) -> None:
    shown.click("#tab-machines")
    shown.click("#machines summary:has-text('Hardware')")
    table = shown.locator('[aria-label^="Hardware"] table.sortable').first
    button = table.locator("thead th", has_text="TPS").first.locator("button")
    for _ in ("ascending", "descending"):
        button.click()
        labels = table.locator("tbody th").all_inner_texts()
        assert labels == sorted(labels)
        assert labels[:3] == ["measured", "measured", "published"]


def test_a_click_sorts_by_figures_and_says_so(shown: Any) -> None:
    shown.click("#tab-runs")
    shown.click("#tables-1 > summary")
    table = shown.locator("#tables-1 table.sortable").first
    header = table.locator("thead th", has_text="TPS").first
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert table.locator("tbody tr").first.inner_text().startswith("</script>")


def test_the_keyboard_sorts_too(shown: Any) -> None:
    shown.click("#tab-machines")
    shown.locator("#machines summary").first.click()
    header = shown.locator("#machines table.sortable thead th").first
    header.locator("button").focus()
    shown.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"


def test_rows_are_filtered_by_words(shown: Any) -> None:
    shown.click("#tab-runs")
    shown.fill("#filter", "BASELINE")
    assert re.fullmatch(r"\d+ of \d+ rows", shown.inner_text("#count"))
    rows = shown.locator("#runs .run > .scroll tbody tr:visible")
    assert rows.count() > 0
    assert all("baseline" in row.lower() for row in rows.all_inner_texts())


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_closing_a_rungs_detail_leads_back_to_its_bar_even_after_the_window_was_resized(
    by: str, shown: Any
) -> None:
    bar = shown.locator("#climbed [role=button]").nth(1)
    bar.click()
    shown.set_viewport_size({"width": 800, "height": 700})
    shown.wait_for_selector("#climbed .on", state="attached")
    shown.click("#rung button") if by == "button" else shown.keyboard.press("Escape")
    shown.wait_for_selector("#rung", state="hidden")
    assert bar.evaluate("bar => bar === document.activeElement")
    assert shown.locator("#climbed .on").count() == 0


@pytest.mark.parametrize("tab", ["climb", "machines", "attribution", "trainers", "published", "runs"])
def test_nothing_is_wider_than_a_phone(shown: Any, tab: str) -> None:
    shown.click(f"#tab-{tab}")
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390


def test_printed_it_lies_on_wide_sheets_that_no_table_exceeds(shown: Any) -> None:
    """What is wider than its sheet, a browser prints smaller: all of the page."""
    pdf = shown.pdf(prefer_css_page_size=True)
    ((width, height), *_) = [
        map(float, found) for found in re.findall(rb"/MediaBox *\[0 0 ([\d.]+) ([\d.]+)\]", pdf)
    ]
    assert width > height
    shown.click("#tab-machines")
    shown.emulate_media(media="print")
    shown.set_viewport_size({"width": round((width / 72 - 20 / 25.4) * 96), "height": 700})
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_every_chart_and_control_has_a_name_for_those_who_do_not_see_it(shown: Any) -> None:
    for tab in ("machines", "attribution", "published", "climb"):
        shown.click(f"#tab-{tab}")
    assert shown.locator("svg.chart").count() > 3
    assert shown.locator("svg.chart:not([aria-label]), svg.chart g:not([aria-label])").count() == 0
    assert shown.evaluate(
        "[...document.querySelectorAll('select, input')].every((each) => each.labels.length)"
    )
    assert shown.evaluate("document.documentElement.lang") == "en"


def test_without_scripts_all_tables_are_there_and_the_page_says_why_there_is_no_chart(
    browser: Any, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "index.html"
    file.write_text(text, encoding="utf-8")
    tab = browser.new_page(java_script_enabled=False)
    tab.goto(file.as_uri())
    assert tab.locator("noscript p").is_visible()
    assert tab.locator("[role=tablist]").is_hidden()
    assert tab.locator("#runs").is_visible()
    tab.close()


def test_no_two_parts_of_the_page_have_the_same_name(text: str) -> None:
    names = re.findall(r'\bid="([^"]+)"', text)
    assert len(names) == len(set(names))


def test_the_page_of_all_results_takes_less_than_2_megabytes() -> None:
    assert (ROOT / "reports" / "index.html").stat().st_size < 2_000_000
