"""The grids of "Figure 6": what is drawn and tabulated is what the summaries say, and titles say what differs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.plots.figure6 import GridPanel, choose_selectors, figure6, grid_panels, grid_table
from analysis.plots.style import selector_styles
from analysis.records.store import load_records
from analysis.stats.summary import summarize
from olmo_sparsity.util.errors import UserError
from tests.support.made_up_records import made_up_records
from tests.support.made_up_summary import EVERY_SELECTOR, FEW_SELECTORS, made_up_summary
from tests.support.refusals import assert_refused

SIZES = {"20m": "a" * 64, "60m": "b" * 64}


def of_model(size: str, n_long: int, selectors: tuple[str, ...] = FEW_SELECTORS, **settings: Any) -> dict:
    checkpoint = {"checkpoint": f"runs/pose-{size}/step00001100", "checkpoint_sha256": SIZES[size]}
    return made_up_summary(selectors, n_long=n_long, **checkpoint, **settings)


@pytest.fixture(scope="module")
def summaries() -> list[dict]:
    """Two sizes at two lengths, the last cell missing; the largest was measured at further k and with `greedy`."""
    return [
        of_model("60m", 256, ("leave-one-out", "greedy", "random")),
        of_model("20m", 128),
        of_model("60m", 128, tau_nats=0.5),
    ]


SOURCES = ["runs/a", "runs/b", "runs/c"]


def places(panels: list[GridPanel]) -> list[tuple[int, int]]:
    return [(panel.row, panel.column) for panel in panels]


def test_panels_stand_where_their_settings_say(summaries: list[dict]) -> None:
    by_both = grid_panels(SOURCES, summaries, rows="n_long", columns="checkpoint")
    assert places(by_both) == [(1, 0), (0, 1), (0, 0)]  # lengths ascend, checkpoints in the order given
    assert places(grid_panels(SOURCES, summaries)) == [(0, 0), (0, 1), (0, 2)]
    assert places(grid_panels(SOURCES, summaries, rows="n_long")) == [(1, 0), (0, 0), (0, 1)]
    assert places(grid_panels(SOURCES, summaries, columns="n_long")) == [(0, 1), (0, 0), (1, 0)]


def test_drawn_panels_are_at_these_places_and_share_their_axes(summaries: list[dict]) -> None:
    panels = grid_panels(SOURCES, summaries, rows="n_long", columns="checkpoint")
    axes = figure6(panels, ["random"], net=True).axes
    specs: Any = [each.get_subplotspec() for each in axes]
    drawn = {
        (each.rowspan.start, each.colspan.start): one.get_title("left")
        for each, one in zip(specs, axes, strict=True)
    }
    assert drawn == {(panel.row, panel.column): panel.title for panel in panels}
    assert len({one.get_ylim() for one in axes}) == len({one.get_xlim() for one in axes}) == 1


@pytest.mark.parametrize("net", [True, False])
def test_curves_are_the_summaries(summaries: list[dict], net: bool) -> None:
    panels = grid_panels(SOURCES, summaries)
    selectors = ["leave-one-out", "greedy", "nearest"]
    keys = ["net_recovery"] if net else ["placebo_recovery", "recovery"]
    styles = selector_styles(EVERY_SELECTOR)
    for axes, summary in zip(figure6(panels, selectors, net=net).axes, summaries, strict=True):
        lines: dict[Any, Any] = {line.get_label(): line for line in axes.lines}
        measured = [name for name in selectors if name in summary["selectors"]]
        names = {f"{name} {key}" for name in measured for key in keys}
        assert {label for label in lines if not label.startswith("_")} == names
        for name in measured:
            for key in keys:
                line = lines[f"{name} {key}"]
                wanted = [values[key]["value"] for values in summary["selectors"][name].values()]
                assert line.get_ydata().tolist() == wanted
                assert (abs(np.log2(np.divide(line.get_xdata(), [1, 2, 4, 8]))) < 0.25).all()
                assert (line.get_color(), line.get_marker()) == styles[name][:2]
                if key == "placebo_recovery":
                    assert line.is_dashed() and line.get_markerfacecolor() == "white"


def test_titles_say_what_was_measured_and_what_differs(summaries: list[dict]) -> None:
    titles = [panel.title for panel in grid_panels(SOURCES, summaries)]
    over = "10.8 % of 2,400 over $\\tau$"
    assert titles == [
        f"pose-60m\nN = 256, M = 16\n{over}\n$\\tau$ = 1 nat",
        f"pose-20m\nN = 128, M = 16\n{over}\n$\\tau$ = 1 nat",
        f"pose-60m\nN = 128, M = 16\n{over}\n$\\tau$ = 0.5 nats",
    ]
    labelled = [panel.title for panel in grid_panels(SOURCES, summaries, labels=["x", "y", "z"])]
    assert labelled[0] == f"x\nN = 256, M = 16\n{over}\n$\\tau$ = 1 nat"


def test_titles_name_other_text_options_and_cross_fitting() -> None:
    other = {"evaluation_checkpoint": "runs/seed2/step7", "evaluation_checkpoint_sha256": "e" * 64}
    pair = [
        of_model("20m", 128, corpus="data/docs", options={"window": 9, "subsets": 32}),
        of_model("20m", 128, corpus="data/books", corpus_manifest_sha256="f" * 64, crossfit=True, **other),
    ]
    first, second = (panel.title.split("\n")[3:] for panel in grid_panels(["a", "b"], pair))
    assert first == ["evaluated with: itself", "text: docs", "window: 9"]
    assert second == ["evaluated with: seed2", "text: books", "window: none"]


@pytest.mark.parametrize(
    ("checkpoints", "names"),
    [
        ((("runs/a/step1", "x"), ("runs/a/step2", "y")), ("a/step1", "a/step2")),
        ((("one/run/step1", "x"), ("two/run/step1", "y")), ("one/run", "two/run")),
        ((("runs/a/step1", "x"), ("moved/b/step1", "x")), ("a", "a")),  # the same weights at two places
        ((("model", "x" * 64), ("model", "y" * 64)), ("model (xxxxxx)", "model (yyyyyy)")),
        (
            (("runs/a/step1@yarn:4", "x"), ("runs/a/step1", "x")),
            ("a@yarn:4", "a"),
        ),  # the same weights, read in two ways
        ((("hub/gpt@ntk:2", "x"), ("hub/gpt", "x")), ("gpt@ntk:2", "gpt")),
    ],
)
def test_models_are_named_as_shortly_as_tells_them_apart(checkpoints: Any, names: tuple[str, str]) -> None:
    pair = [made_up_summary(checkpoint=path, checkpoint_sha256=checksum) for path, checksum in checkpoints]
    assert tuple(panel.title.split("\n")[0] for panel in grid_panels(["a", "b"], pair)) == names


def test_selectors_are_the_default_the_controls_and_best() -> None:
    panels = grid_panels(["a", "b"], [made_up_summary(("leave-one-in", "random")), made_up_summary()])
    assert choose_selectors(panels) == ["leave-one-out", "random", "nearest", "best"]
    assert choose_selectors(panels[:1]) == ["leave-one-in", "random"]
    older, newer = made_up_summary(("leave-one-out",)), made_up_summary(("leave-one-out",))
    newer["selectors"]["leave-one-out-kl"] = newer["selectors"]["leave-one-out"]
    assert choose_selectors(grid_panels(["a", "b"], [older, newer]))[0] == "leave-one-out"
    assert choose_selectors(grid_panels(["b"], [newer]))[0] == "leave-one-out-kl"
    assert choose_selectors(panels, ["greedy"]) == ["greedy"]
    with pytest.raises(UserError, match="selector shapley; choose from leave-one-in, random"):
        choose_selectors(panels, ["greedy", "shapley"])


def test_a_screened_selector_looks_as_in_figure_2_when_others_are_left_out() -> None:
    name = "greedy@gradient:32"
    axes = figure6(grid_panels(["a"], [made_up_summary()]), [name], net=True).axes[0]
    line: Any = axes.lines[0]
    assert (line.get_color(), line.get_marker()) == selector_styles(EVERY_SELECTOR)[name][:2]
    assert line.get_color() != selector_styles([name])[name][0]


def test_what_cannot_be_arranged_is_refused(summaries: list[dict]) -> None:
    with pytest.raises(UserError, match="runs/b and runs/c have the same n_long and n_short"):
        grid_panels(SOURCES, summaries, rows="n_long", columns="n_short")
    with pytest.raises(UserError, match="colour is no setting of runs/a; choose from .*n_long"):
        grid_panels(SOURCES, summaries, rows="colour")
    with pytest.raises(UserError, match="2 labels for 3 records folders"):
        grid_panels(SOURCES, summaries, labels=["x", "y"])


def test_table_is_what_is_drawn(summaries: list[dict]) -> None:
    panels = grid_panels(SOURCES, summaries, rows="n_long", columns="checkpoint")
    table = grid_table(panels, ["leave-one-out", "nearest"])["panels"]
    assert [(each["records"], each["row"], each["column"]) for each in table] == [
        ("runs/a", 1, 0), ("runs/b", 0, 1), ("runs/c", 0, 0),
    ]  # fmt: skip
    assert [list(each["selectors"]) for each in table] == [
        ["leave-one-out"], ["leave-one-out", "nearest"], ["leave-one-out", "nearest"],
    ]  # fmt: skip
    assert [(each["n_long"], each["tau_nats"]) for each in table] == [(256, 1.0), (128, 1.0), (128, 0.5)]
    for each, summary in zip(table, summaries, strict=True):
        assert each["share_over_tau"] == summary["share_over_tau"]
        for k, values in each["selectors"]["leave-one-out"].items():
            whole = summary["selectors"]["leave-one-out"][k]
            assert values == {key: whole[key] for key in ("recovery", "placebo_recovery", "net_recovery")}


def test_script_draws_real_records(tmp_path: Path, run_here: Any) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    made_up_records(folders[0])
    made_up_records(folders[1], tau_nats=0.5, selectors=("leave-one-out", "nearest"))
    out = tmp_path / "out"
    result = run_here("scripts/figure6.py", *folders, "--out", out, "--rows", "tau_nats", "--resamples", 1000)
    assert result.returncode == 0, result.stderr
    names = ["figure6-recovery.pdf", "figure6-recovery.png", "figure6.json", "figure6.pdf", "figure6.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    panels = json.loads((out / "figure6.json").read_text())["panels"]
    assert [(each["records"], each["row"]) for each in panels] == [(str(folders[0]), 1), (str(folders[1]), 0)]
    assert list(panels[0]["selectors"]) == ["leave-one-out", "random", "best"]
    whole = summarize(load_records(folders[1]), 1000)["selectors"]["nearest"]["4"]
    assert panels[1]["selectors"]["nearest"]["4"]["net_recovery"] == whole["net_recovery"]
    refused = run_here("scripts/figure6.py", folders[0], "--out", out / "other", "--selectors", "shapley")
    assert_refused(refused, "no records of selector shapley")
    assert not (out / "other").exists()
