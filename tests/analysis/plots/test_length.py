"""Loss by position and at each length: what is drawn is what `length.json` says."""

import copy

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from analysis.plots.length import MOST_CURVES, length_figure, lengths_figure, plot_length
from analysis.plots.style import new_figure
from tests.support.drawn import legend_names
from tests.support.made_up_length import made_up_length

LENGTHS = [128, 256, 512]


def with_models(*labels):
    """The made-up file with these models, each of its own losses."""
    found = made_up_length()
    model = found["models"][0]
    found["models"] = [{**copy.deepcopy(model), "label": label} for label in labels]
    return found


def drawn(axes):
    return {line.get_label(): line for line in axes.lines if not str(line.get_label()).startswith("_")}


def test_panel_d_draws_the_file():
    found = made_up_length()
    axes = new_figure(4, 3).subplots()
    plot_length(axes, found)
    curves = drawn(axes)
    assert list(curves) == ["RoPE", "RoPE + PoSE"]
    bands = [each for each in axes.collections if isinstance(each, PolyCollection)]
    for (label, line), band, each in zip(curves.items(), bands, found["models"], strict=True):
        assert label == each["label"]
        assert list(line.get_ydata()) == [one["loss_nats"]["value"] for one in each["bins"]]
        for x, one in zip(line.get_xdata(), each["bins"], strict=True):
            assert one["from"] <= x <= one["to"] - 1
        edges = band.get_paths()[0].vertices[:, 1]
        for one in each["bins"]:
            assert all(np.isclose(edges, one["loss_nats"][bound]).any() for bound in ("low", "high"))
    upright = {line.get_xdata()[0] for line in axes.lines if line not in curves.values()}
    assert upright == {128, 512} and not axes.texts  # named in the legend: no label over a curve
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["RoPE", "RoPE + PoSE", "trained window: 128", "reach of trained ids: 512"]
    assert axes.get_xscale() == "log" and "[nats per token]" in axes.get_ylabel()
    assert "20 windows of 512 tokens in 9 documents" in length_figure(found).get_suptitle()


@pytest.mark.parametrize(("seeds", "by"), [(1, "by document"), (2, "by training and document")])
def test_the_heading_says_that_seeds_are_drawn(seeds, by):
    found = made_up_length()
    for model in found["models"]:
        model["checkpoints"] = model["checkpoints"][:1] * seeds
    for figure in (length_figure(found), lengths_figure(found)):
        assert f"95 %, {by}" in " ".join(figure.get_suptitle().split())


def test_many_models_have_a_panel_for_each_family_with_the_first_in_all():
    labels = ["RoPE", "RoPE + PoSE (2 chunks)", "RoPE + PoSE (4 chunks)", "ALiBi", "NoPE", "RoPE YaRN x 2"]
    figure = length_figure(with_models(*labels))
    titles = ["ids with gaps", "NoPE, ALiBi", "RoPE with YaRN"]
    assert [axes.get_title("left") for axes in figure.axes] == titles
    members = [["RoPE", *labels[1:3]], ["RoPE", *labels[3:5]], ["RoPE", labels[5]]]
    assert [list(drawn(axes)) for axes in figure.axes] == members
    assert legend_names(figure)[: len(labels)] == labels
    assert len(length_figure(with_models(*labels[:MOST_CURVES])).axes) == 1


def test_the_loss_at_each_length_is_drawn_a_row_per_model():
    found = made_up_length()
    panels = lengths_figure(found).axes
    assert [axes.get_title("left") for axes in panels] == [f"at {length} tokens" for length in LENGTHS]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["RoPE", "RoPE + PoSE"]
    for place, axes in enumerate(panels):
        for number, (container, each) in enumerate(zip(axes.containers, found["models"], strict=True)):
            loss = each["at_lengths"][place]["loss_nats"]
            point, _, (bar,) = container
            assert (point.get_xdata()[0], point.get_ydata()[0]) == (loss["value"], number)
            assert sorted(bar.get_segments()[0][:, 0]) == pytest.approx([loss["low"], loss["high"]])
