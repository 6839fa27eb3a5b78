"""The report page, as a file: what stands in it is what was measured, and nothing in it can break out or be loaded."""

import base64
import hashlib
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis.records.results import COMPARISON, LONGPPL
from analysis.records.schema import FAR_CONTEXTS, Examples
from analysis.records.store import Records, RecordWriter
from analysis.report.page import (
    choose_examples,
    embed_json,
    figure_image,
    influence_command,
    page_data,
)
from analysis.report.words import bounds
from analysis.stats.compare import compare
from analysis.stats.summary import summarize
from olmo_sparsity.util.provenance import command_line
from tests.support.made_up_records import made_up_records
from tests.support.made_up_report import (
    CONTROLS,
    SELECTORS,
    SIGNS,
    Page,
    made_up,
    made_up_examples,
    make_page,
    readable_records,
)
from tests.support.refusals import assert_refused

ROOT = Path(__file__).parents[3]
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><!--&lt;\u2028"


@pytest.fixture(scope="module")
def records() -> Records:
    return readable_records()


@pytest.fixture(scope="module")
def html(records: Records) -> str:
    return make_page(records)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_nothing_is_loaded_and_only_our_script_may_run(page: Page) -> None:
    addresses = [
        each[name]
        for _, each in page.elements
        for name in ("src", "href", "action", "srcset")
        if name in each
    ]
    assert addresses and all(address.startswith(("data:", "#")) for address in addresses)
    assert [tag for tag, _ in page.raw] == ["style", "script", "script"]
    policy = next(each["content"] for _, each in page.elements if "http-equiv" in each)
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    assert allowed["default-src"] == allowed["base-uri"] == allowed["form-action"] == "'none'"
    assert allowed["img-src"] == "data:" and set(allowed) == {
        "default-src", "base-uri", "form-action", "img-src", "script-src", "style-src",
    }  # fmt: skip
    for name, text in (("style-src", page.raw[0][1]), ("script-src", page.raw[2][1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed[name] == f"'sha256-{digest}'"
    assert not any(name.startswith("on") or name == "style" for _, each in page.elements for name in each)
    assert "innerHTML" not in page.raw[2][1] and "http" not in page.raw[0][1] + page.raw[2][1]


def test_examples_are_the_records(records: Records, page: Page) -> None:
    data = page.data()
    assert (data["ks"], data["k"], data["n_long"], data["n_short"]) == ([1, 2, 4, 8], 4, 24, 8)
    assert data["selectors"] == list(SELECTORS)
    assert data["units"] == ["of the attention", "nats", "nats", ""]
    assert len(data["examples"]) == len(records.over) and records.examples is not None
    for i, each in enumerate(data["examples"]):
        targets, texts = records.targets, records.examples
        assert (each["id"], each["document"], each["position"]) == (
            100 + i, targets.document[i], targets.position[i],
        )  # fmt: skip
        assert data["kinds"][each["kind"]] == targets.kind[i]
        assert each["short"] == pytest.approx(targets.loss_short_nats[i], abs=6e-4)
        assert each["long"] == pytest.approx(targets.loss_long_nats[i], abs=6e-4)
        assert each["gain"] == pytest.approx(each["short"] - each["long"], abs=2e-3)
        assert (each["context"], each["placebo"]) == (texts.context_pieces[i], texts.placebo_pieces[i])
        assert (each["target"], each["after"]) == (f" target{100 + i}", texts.after[i])
        assert each["placebo_document"] == targets.placebo_document[i]
        for s, name in enumerate(SELECTORS):
            for c, context in enumerate(FAR_CONTEXTS):
                positions, influence, losses = each["selections"][s][c]
                assert positions == records.selected[name][context][i].tolist()
                np.testing.assert_allclose(influence, records.influence[name][context][i], rtol=6e-3)
                np.testing.assert_allclose(losses, records.loss_nats[name][context][i], atol=6e-4)


def test_text_is_found_by_target_id_not_by_row(records: Records) -> None:
    assert records.examples is not None
    texts = records.examples
    backwards = Examples(
        texts.target_id[::-1], texts.context_pieces[::-1], texts.target_piece[::-1],
        texts.placebo_pieces[::-1], texts.after[::-1],
    )  # fmt: skip
    rows = np.arange(len(records.over))
    assert page_data(replace(records, examples=backwards), rows, 4) == page_data(records, rows, 4)


def test_influence_that_does_not_exist_is_null(records: Records) -> None:
    influence = {
        name: {c: values.copy() for c, values in each.items()} for name, each in records.influence.items()
    }
    influence["leave-one-in@gradient:32"]["true"][3, 5] = np.nan
    data = page_data(replace(records, influence=influence), np.arange(4), 4)
    assert data["examples"][3]["selections"][2][0][1][5] is None
    json.loads(embed_json(data))  # NaN would be refused


@pytest.mark.parametrize(
    "text", [HOSTILE, "<!--<script>", "</script <!-- <script ", "]]>", "\\u003c/script>", "\u2029\x00\ud7ff𐀀"]
)
def test_hostile_text_stays_text(records: Records, text: str) -> None:
    assert records.examples is not None
    pieces = [[text, *each[1:]] for each in records.examples.context_pieces]
    examples = replace(
        records.examples, context_pieces=pieces, target_piece=[text] * len(pieces), after=[text] * len(pieces)
    )
    manifest = replace(records.manifest, checkpoint=f"runs/{text}", corpus=text)
    summary = made_up(checkpoint=text)
    page = Page(make_page(replace(records, examples=examples, manifest=manifest), summary, command=text))
    assert [tag for tag, _ in page.raw] == ["style", "script", "script"]
    assert len([tag for tag, _ in page.elements if tag == "img"]) == 1
    assert not any(name.startswith("on") for _, each in page.elements for name in each)
    assert not set("<>&") & set(page.raw[1][1])  # so that no browser's idea of where the element ends matters
    for each in page.data()["examples"]:
        assert each["context"][0] == each["target"] == each["after"] == text


def test_no_text_can_reorder_the_page(records: Records) -> None:
    """Whatever changes the direction of writing is shown by its name, in every place that shows what others wrote."""
    text = f"a{CONTROLS}/b"
    named = f"a{SIGNS}/b"
    assert records.examples is not None
    pieces = [[text, *each[1:]] for each in records.examples.context_pieces]
    manifest = replace(
        records.manifest, checkpoint=f"x/{text}", corpus=text, split=text, commit=text,
        evaluation_checkpoint=text, evaluation_checkpoint_sha256="e" * 64,
    )  # fmt: skip
    summary = made_up(checkpoint=text, corpus=text, crossfit=True)
    intervals = {side: {"value": 0.5, "low": 0.4, "high": 0.6} for side in ("first", "second", "difference")}
    comparison = {
        **{side: {"checkpoint": text} for side in ("first", "second")},
        "share_over_tau": intervals, "gap_short_minus_long": intervals,
        "selectors": {text: {text: {f"{kind}recovery": intervals for kind in ("", "placebo_", "net_")}}},
        "targets_over_tau_in_both": 3,
        "overlap": {text: {text: {**dict.fromkeys(("true", "placebo"), intervals["first"]), "chance": 0.1}}},
        "lds_ceiling": None,
    }  # fmt: skip
    examples = replace(records.examples, context_pieces=pieces)
    html = make_page(
        replace(records, manifest=manifest, examples=examples), summary, command=text, comparison=comparison
    )
    assert not set(CONTROLS) & set(html)
    page = Page(html)
    assert {each["context"][0] for each in page.data()["examples"]} == {text}  # escaped there, and whole
    assert f"<title>How much of the far context do a few tokens carry? a{SIGNS}/b</title>" in html
    # h1; checkpoint, evaluating one, corpus, split; settings; commit; A, B and a selector with its k
    assert page.text.count(named) >= 13
    whole = "".join(page.isolated)
    assert whole.count(SIGNS) == page.text.count(SIGNS) - 1  # all but that in the title


def test_all_examples_are_chosen_where_they_fit(records: Records) -> None:
    for count in (40, 1000):
        assert choose_examples(records, count).tolist() == list(range(40))
    assert len(choose_examples(records, 0)) == 0
    assert records.examples is not None
    some = Examples(*(getattr(records.examples, name)[7:] for name in vars(records.examples)))
    assert choose_examples(replace(records, examples=some), 1000).tolist() == list(range(7, 40))


def test_chosen_examples_keep_the_proportions() -> None:
    records = readable_records(1000)
    chosen = choose_examples(records, 200)
    assert len(set(chosen.tolist())) == 200 and chosen.tolist() == sorted(chosen)
    kinds, gain = records.targets.kind, records.targets.selecting_gain_nats
    for kind in set(kinds.tolist()):
        of_kind, shown = np.sort(gain[kinds == kind]), np.sort(gain[chosen][kinds[chosen] == kind])
        assert abs(len(shown) - len(of_kind) / 5) <= 1
        for low, high in ((0, 0.5), (0.5, 1)):  # and each half of the gains its share of them
            edges = np.quantile(of_kind, [low, high])
            inside = ((shown >= edges[0]) & (shown <= edges[1])).sum()
            assert abs(inside - len(shown) / 2) <= 2
    note = "200 of 1,000 measured targets over tau"
    assert note in Page(make_page(records, examples=200)).text


def test_without_text_there_is_no_browser(records: Records) -> None:
    page = Page(make_page(replace(records, examples=None)))
    assert page.data()["examples"] == [] and "No examples: these records hold no text" in page.text


def test_crossfit_shows_the_evaluating_models_gain() -> None:
    records = readable_records(crossfit=True)
    summary = made_up(crossfit=True, evaluation_checkpoint="runs/b")
    page = Page(make_page(records, summary))
    for each in page.data()["examples"]:
        assert each["gain"] == pytest.approx(each["selecting_gain"] / 2, abs=1e-3)
    assert "evaluated by runs/b" in page.text and "Cross-fitted" in page.text
    assert "--select-with runs/a --evaluate-with runs/b" in page.text


def reading(summary: dict) -> str:
    """The paragraphs on what was found."""
    prose = make_page(readable_records(), summary).partition('<div class="prose">')[2].partition("</div>")[0]
    return Page(prose).text.replace("\u00a0", " ")


def test_words_say_the_numbers() -> None:
    summary = made_up()
    text = reading(summary)
    found = summary["selectors"]["leave-one-out"]["4"]
    for name in ("recovery", "placebo_recovery", "net_recovery"):
        value, low, high = (round(100 * found[name][bound]) for bound in ("value", "low", "high"))
        assert f"{value} % [{low}, {high}]" in text
    assert "Of 2,400 tokens sampled from 604 held-out documents, 258 (10.8 % [9.6, 11.9])" in text
    assert "the 128 tokens before them instead of the last 16" in text and "more than 1 nat " in text
    assert "“content word”: 37 % " in text  # 96 of 258
    rough = reading(made_up(complete=False, targets_measured=12, documents_over_tau=7))
    for part in ("Unfinished: 12 of 258 targets", "Only 7 documents"):
        assert part in rough and part.partition(" ")[0] not in text


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.1, 0.3, "above zero"),
        (-0.1, 0.3, "includes zero"),
        (-0.3, -0.1, "below zero"),
        (None, None, "nothing can be"),
    ],
)
def test_verdict_follows_the_interval(low: float | None, high: float | None, said: str) -> None:
    summary = made_up()
    summary["selectors"]["leave-one-out"]["4"]["net_recovery"] = {"value": 0.2, "low": low, "high": high}
    text = reading(summary)
    assert said in text
    for other in {"above zero", "includes zero", "below zero", "nothing can be"} - {said}:
        assert other not in text


def written(interval: dict, scale: float = 1.0, digits: int = 2) -> str:
    """A cell, formatted by another way than the page's."""
    value, low, high = (f"{scale * interval[name]:,.{digits}f}" for name in ("value", "low", "high"))
    text = f"{value} [{low},\u00a0{high}]".replace("-", "−")
    return re.sub(r"−(0(\.0+)?)(?=[ ,\]])", r"\1", text)


def test_tables_are_the_summary(page: Page) -> None:
    summary = made_up()
    rows = iter(page.rows("k"))
    for name, per_k in summary["selectors"].items():
        assert next(rows)[0].startswith(name)
        for k, values in per_k.items():
            shares = [written(values[f"{kind}recovery"], 100, 0) for kind in ("", "placebo_", "net_")]
            assert next(rows) == [k, written(values["loss"]), *shares]
    for each, row in zip(summary["kinds"]["kinds"], page.rows("kind"), strict=True):
        found = each["selectors"]["leave-one-out"]
        assert row == [
            each["kind"],
            f"{each['targets_over_tau']} {each['documents_over_tau']} documents",
            written(each["share_over_tau"], 100, 0),
            written(each["share"], 100, 0),
            written(each["gap_short_minus_long"]),
            *(written(found[f"{kind}recovery"], 100, 0) for kind in ("", "placebo_", "net_")),
        ]
    shown = page.rows("selector", 0)
    rows = iter(page.rows("selector", 1))
    assert [row[0].split()[0] for row in shown] == list(summary["selectors"])
    assert shown[0][4] == written(summary["selectors"]["leave-one-out"]["4"]["net_recovery"], 100, 0)
    for name, found in summary["tokens_needed"]["selectors"].items():
        true, placebo = ([written(each, 100, 0) for each in found[context]] for context in FAR_CONTEXTS)
        assert next(rows) == [name, *true, written(found["censored"], 100, 0)]
        assert next(rows) == [f"{name}, placebo", *placebo, ""]
    rows = iter(page.rows("selector", 2))
    for name, found in summary["faithfulness"]["selectors"].items():
        for context in FAR_CONTEXTS:
            title, *cells = next(rows)
            assert title == (name if context == "true" else f"{name}, placebo")
            drops, lds, overlap = (found[each] for each in ("comprehensiveness_nats", "lds", "overlap"))
            assert cells[0] == written(found["sufficiency_nats"][context]["aopc"])
            assert cells[1] == (written(drops[context]["aopc"]) if drops else "–")
            assert cells[2] == (written(lds[context]) if lds else "–")
            assert cells[4] == (written(overlap[context]["4"], 100, 0) if overlap else "–")
    first = summary["distances"]["selectors"]["leave-one-out"]
    assert page.rows("distance")[0] == [
        "17 to 23",
        *(written(first[each][0], 100, 0) for each in FAR_CONTEXTS),
    ]
    assert page.rows("kind of token")[0][1:] == ["10 [8,\u00a012]", "20 [18,\u00a022]"] * 2
    assert [row[1] for row in page.rows("of all targets")][1] == "60.0 [58.0,\u00a062.0]"
    (row,) = page.rows("difference")
    assert row == ["greedy − leave-one-out", "−5 [−7,\u00a0−3]", "−5 [−7,\u00a0−3]"]


def test_missing_intervals_are_told() -> None:
    nothing = {"value": None, "low": None, "high": None}
    summary = made_up()
    summary["kinds"]["kinds"][0]["selectors"]["leave-one-out"]["recovery"] = nothing
    summary["kinds"]["kinds"][1]["selectors"]["leave-one-out"]["recovery"] = {**nothing, "value": 0.5}
    rows = Page(make_page(readable_records(), summary)).rows("kind")
    assert rows[0][5] == "–" and rows[1][5] == "50 no interval"
    assert bounds(nothing) == "no interval"


def test_command_of_the_records_is_understood_by_its_script(records: Records) -> None:
    module = importlib.import_module("analysis.cli.influence")
    command = shlex.split(influence_command(replace(records, folder=Path("with space/records"))))
    assert command[:2] == ["python", "scripts/influence.py"]
    given = vars(module._parser().parse_args(command[2:]))
    expected = {
        "checkpoint": "runs/a", "corpus": "data/docs", "out": Path("with space/records"), "split": "heldout",
        "n_long": 24, "n_short": 8, "tau_nats": 1.0, "ks": (1, 2, 4, 8), "selectors": tuple(SELECTORS),
        "targets": 40, "seed": 0, "bf16": False, "evaluate_with": None,
    }  # fmt: skip
    assert {name: given[name] for name in expected} == expected
    assert influence_command(replace(records, manifest=replace(records.manifest, dtype="bf16"))).endswith(
        "--bf16"
    )
    options = {
        "subsets": 8, "keep_rate": 0.5, "targets_per_block": 16, "further_placebos": ["same-group", "shuffled"],
        "proposer_sha256": "ab" * 32, "proposer_rope_scaling": "yarn:4",
    }  # fmt: skip
    other = replace(records, manifest=replace(records.manifest, options=options, tau_nats=1 / 3))
    given = vars(module._parser().parse_args(shlex.split(influence_command(other))[2:]))
    assert (given["subsets"], given["targets_per_block"]) == (8, 16) and not given["only_recovery"]
    assert given["further_placebos"] == ("same-group", "shuffled")
    assert given["propose_with"] == "WEIGHTS-abababababab@yarn:4"
    assert given["tau_nats"] == 1 / 3  # to the last digit: records go on with the same settings only


def test_figures_are_in_the_page_and_reproducible(records: Records, html: str) -> None:
    assert make_page(records) == html
    figure = Figure()
    figure.subplots().set_title("a title")
    address = figure_image(figure)
    prefix = "data:image/svg+xml;base64,"
    assert address.startswith(prefix)
    svg = base64.b64decode(address.removeprefix(prefix)).decode()
    assert "<svg" in svg and "<dc:date>" not in svg and figure_image(figure) == address
    assert len(re.findall(r'<img src="data:image/svg\+xml;base64,[A-Za-z0-9+/=]+" alt="[^"]+"', html)) == 1


def test_an_installed_package_has_the_parts_of_the_page() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setup["package-data"]["analysis"]
    parts = [
        path.relative_to(ROOT / "analysis") for path in (ROOT / "analysis" / "report" / "templates").iterdir()
    ]
    assert {"page.html", "notebook.html", "style.css", "page.js"} <= {part.name for part in parts}
    for part in parts:
        assert any(fnmatch(part.as_posix(), pattern) for pattern in patterns)


OF_LATER_COMPARISONS = ("overlap", "lds_ceiling", "targets_over_tau_in_both")


def test_real_summary_comparison_and_longppl_fit(tmp_path: Path) -> None:
    """Summary, comparison and LongPPL as the code that makes them leaves them."""
    from analysis.stats.longppl import TargetLosses, summarize_longppl

    records = made_up_records(tmp_path / "records", 300)
    comparison = compare(records, made_up_records(tmp_path / "other", 300), 1000)
    rng = np.random.default_rng(0)
    long = rng.gamma(1.0, 1.0, (12, 20))
    losses = TargetLosses(
        long, {form: long + rng.gamma(1.0, 1.5, long.shape) for form in ("exact", "published")},
        {"long": 1, "exact": 4321, "published": 2},
    )  # fmt: skip
    longppl = summarize_longppl(losses, np.arange(12), resamples=1000)
    settings = {"n_long": 64, "n_short": 16, "sliding_window": 4, "alpha_nats": 2.0, "beta_nats": 2.0}
    LONGPPL.save(tmp_path / "longppl.json", {**longppl, "settings": settings})
    COMPARISON.save(tmp_path / "compare.json", comparison)
    summary = summarize(records, 1000)
    page = Page(
        make_page(
            records,
            summary,
            longppl=LONGPPL.load(tmp_path),
            comparison=COMPARISON.load(tmp_path / "compare.json"),
        )
    )
    measured = longppl["forms"]["exact"]["longppl"]["value"]
    table = next(table for table in page.tables if table[0] == ["", "exact", "published"])
    assert table[3][0] == "LongPPL" and table[3][1].startswith(f"{measured:.2f} [")
    assert table[-1] == ["tokens read", "4,321", "2"]
    shown, folded = (table for table in page.tables if table[0] == ["", "A", "B", "A − B"])
    sides = ("first", "second", "difference")
    heading = folded.index(["greedy [%]"])
    names = {"recovery": "recovery", "placebo_recovery": "placebo recovery", "net_recovery": "net recovery"}
    for place, (name, words) in enumerate(names.items()):
        of_k = {k: comparison["selectors"]["greedy"][k][name] for k in ("2", "4")}
        assert [f"{words} of greedy [%]", *(written(of_k["4"][s], 100, 0) for s in sides)] in shown
        row = [f"k = 2, {words}", *(written(of_k["2"][s], 100, 0) for s in sides)]
        assert folded[heading + 4 + place] == row
    overlap = comparison["overlap"]["greedy"]["4"]
    (table,) = (table for table in page.tables if table[0][-1] == "chance")
    shares = [written(overlap[context], 100, 0) for context in FAR_CONTEXTS]
    assert ["greedy", "4", *shares, "3.6"] in table  # 4 of 112
    assert len(page.rows("k")) == 5 * (1 + 4)  # four selectors and best
    older = {name: value for name, value in comparison.items() if name not in OF_LATER_COMPARISONS}
    assert "that both chose" not in make_page(records, summary, comparison=older)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records")
    records = made_up_records(path)
    examples = made_up_examples(records.targets.target_id[records.over], 128, 16)
    RecordWriter(path, records.manifest).write_examples(examples)
    return path


def test_the_installed_command_is_named_as_it_is_typed(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["olmo-sparsity report", "my records", "--k", "2"])
    assert command_line("scripts/report.py") == "olmo-sparsity report 'my records' --k 2"
    monkeypatch.setattr(sys, "argv", ["/somewhere/scripts/report.py", "records"])
    assert command_line("scripts/report.py") == "python scripts/report.py records"


@pytest.mark.slow
def test_script_writes_the_page(folder: Path, tmp_path: Path, run_here: Any) -> None:
    out = tmp_path / "page.html"
    arguments = (folder, "--resamples", 1000, "--examples", 7, "--out", out, "--k", 2)
    command = [sys.executable, "scripts/report.py", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "") and result.stdout == f"wrote {out}\n"
    first = out.read_bytes()
    page = Page(first.decode())
    assert len(page.data()["examples"]) == 7 and page.data()["k"] == 2
    assert len([tag for tag, _ in page.elements if tag == "img"]) == 5
    assert shlex.join(["python", "scripts/report.py", *map(str, arguments)]) in page.text
    assert run_here("scripts/report.py", *arguments).returncode == 0 and out.read_bytes() == first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--k", 3], "was not measured"),
        (["--longppl", "none"], "longppl"), (["--length", "none"], "length"), (["--compare", "none"], "compare"),
    ],
)  # fmt: skip
def test_script_refuses_in_one_line(
    folder: Path, tmp_path: Path, run_here: Any, arguments: list, said: str
) -> None:
    result = run_here("scripts/report.py", folder, *arguments, "--out", tmp_path / "page.html")
    assert_refused(result, said)
    assert not (tmp_path / "page.html").exists()
