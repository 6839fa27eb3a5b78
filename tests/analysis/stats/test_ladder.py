"""The ladder: points that join records and loss by position, what cannot be joined, and the script."""

import json

import numpy as np
import pytest
from scipy.stats import spearmanr

from analysis.plots.ladder import joint_figure, ladder_figure
from analysis.records.store import load_records
from analysis.stats.ladder import correlations, ladder_points
from analysis.stats.summary import summarize
from olmo_sparsity.util.errors import UserError
from tests.support.made_up_length import SHAS, checkpoint, interval, length_json
from tests.support.made_up_records import made_up_manifest, made_up_targets, write_records

SCRIPT = "scripts/ladder.py"
MEASURED = length_json(
    checkpoint("a", "small", 0.4, 1000),
    checkpoint("b", "small", 0.5, 1000),
    checkpoint("a", "small, YaRN", 0.1, 1000, rope_scaling={"name": "yarn"}),
    checkpoint("c", "large", 0.2, 4000),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Records of a, of c, and of a's targets evaluated with b."""
    folder, made = tmp_path_factory.mktemp("ladder"), {}
    for name, changes in (
        ("a", {"checkpoint_sha256": SHAS["a"]}),
        ("c", {"checkpoint_sha256": SHAS["c"]}),
        ("ab", {"checkpoint_sha256": SHAS["a"], "evaluation_checkpoint": "runs/b",
                "evaluation_checkpoint_sha256": SHAS["b"], "evaluation_training_seed": 2}),
    ):  # fmt: skip
        rng = np.random.default_rng(len(made))
        manifest = made_up_manifest(300, **changes)
        write_records(folder / name, manifest, made_up_targets(300, 30, rng, crossfit=name == "ab"), rng)
        made[name] = folder / name
    return made


@pytest.fixture(scope="module")
def summaries(folders):
    return {name: summarize(load_records(folder), 1000, 0) for name, folder in folders.items()}


def points_of(summaries, measured=MEASURED, names=("a", "c", "ab"), **changes):
    options = {"selector": "leave-one-out", "k": 4, "times": 4, **changes}
    return ladder_points([summaries[name] for name in names], measured, **options)


def test_a_point_joins_what_was_measured_of_the_checkpoint_that_evaluates(summaries):
    points = points_of(summaries)
    assert [point["label"] for point in points] == ["small", "large", "small"]
    assert [point["crossfit"] for point in points] == [False, False, True]
    assert [point["parameters"] for point in points] == [1000, 4000, 1000]
    assert [point["rise_nats"]["value"] for point in points] == [0.4, 0.2, 0.5]
    assert points[2]["training_seed"] == ord("b")
    for name, point in zip(("a", "c", "ab"), points, strict=True):
        found = summaries[name]
        assert point["net_recovery"] == found["selectors"]["leave-one-out"]["4"]["net_recovery"]
        place = found["tokens_needed"]["ks"].index(4)
        assert point["k_suffices"] == found["tokens_needed"]["selectors"]["leave-one-out"]["true"][place]
    (point,) = points_of(summaries, names=["a"], times=2, k=1, selector="greedy")
    assert point["rise_nats"]["value"] == 0.2
    assert point["net_recovery"] == summaries["a"]["selectors"]["greedy"]["1"]["net_recovery"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selector": "nearby"}, "runs/a has no selector nearby; choose leave-one-out"),
        ({"k": 3}, "runs/a was not measured at k = 3; choose 1, 2, 4, 8"),
        ({"times": 3}, "runs/a was not measured at its window and 3 times that; give --lengths 128,384"),
        ({"measured": length_json(MEASURED["models"][2]["checkpoints"][0])}, "runs/a was not measured by position"),
        ({"measured": length_json(MEASURED["models"][1]["checkpoints"][0])}, "without scaling its RoPE"),
        ({"measured": length_json(checkpoint("a", "x", 1, 2, training_length=None))}, "window is not known"),
        ({"measured": length_json(checkpoint("a", "x", 1, 2, training_length=256))}, "the window first"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_one_line(summaries, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        points_of(summaries, names=["a"], **changes)
    assert "\n" not in str(caught.value)


def beyond(summary, n_short=128, gain=0.02, sha=None):
    settings = {**summary["settings"], "n_short": n_short, "n_long": 512}
    settings["checkpoint_sha256"] = sha or settings["checkpoint_sha256"]
    return {**summary, "settings": settings, "all_targets": {"gap_short_minus_long": interval(gain)}}


def test_use_beyond_the_window_is_the_gain_of_the_same_checkpoint(summaries):
    further = [beyond(summaries["c"], gain=0.7), beyond(summaries["a"], gain=-0.1)]
    points = points_of(summaries, names=["a", "c"], beyond=further)
    assert [point["use_nats"]["value"] for point in points] == [-0.1, 0.7]
    assert "use_nats" not in points_of(summaries, names=["a"])[0]
    with pytest.raises(
        UserError, match="runs/c was not measured beyond its window; give its records of --n-short 128"
    ):
        points_of(summaries, names=["a", "c"], beyond=further[1:])
    with pytest.raises(UserError, match="runs/a was measured beyond 64 tokens, and its window has 128"):
        points_of(summaries, names=["a"], beyond=[beyond(summaries["a"], n_short=64)])


def made_up_points(models, seeds, rng):
    """Points whose seeds are far apart and whose models rise the less the more they recover, but for the last one."""
    points = []
    for model in range(models):
        for _ in range(seeds):
            rise = -model if model < models - 1 else 5.0
            noise = rng.normal(0, 0.8, 2)
            points.append({"label": f"model {model}", "crossfit": False, "net_recovery": {"value": model + noise[0]},
                           "k_suffices": {"value": 0.5}, "rise_nats": {"value": rise + noise[1]}})  # fmt: skip
    return points


def test_correlations_are_those_of_the_means_of_seeds_and_told_without_each_model():
    points = made_up_points(7, 3, np.random.default_rng(5))
    found = correlations([*points, {**points[0], "crossfit": True, "net_recovery": {"value": 99.0}}],
                         resamples=1000, seed=0)  # fmt: skip
    values = np.array([(p["net_recovery"]["value"], p["rise_nats"]["value"]) for p in points])
    means = values.reshape(7, 3, 2).mean(axis=1)
    own = found["net_recovery"]
    assert own["value"] == pytest.approx(spearmanr(*means.T).statistic) and own["models"] == 7
    without = [spearmanr(*np.delete(means, model, axis=0).T).statistic for model in range(7)]
    assert list(own["without"].values()) == pytest.approx(without)
    assert own["without"]["model 6"] < -0.9 < own["value"], "one model speaks against it"
    assert found["k_suffices"]["value"] is None and found["k_suffices"]["low"] is None, "it is constant"
    assert correlations(points[:9], resamples=1000, seed=0) == {}, "three models"


def test_the_interval_of_a_correlation_goes_over_models_and_seeds():
    """Against a bootstrap that was written another way; and seeds that agree make it narrower."""
    points = made_up_points(9, 2, np.random.default_rng(7))
    own = correlations(points, resamples=4000, seed=0)["net_recovery"]
    values = np.array([(p["net_recovery"]["value"], p["rise_nats"]["value"]) for p in points]).reshape(
        9, 2, 2
    )
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(4000):
        turns = rng.choice(9, 9)
        of_seeds = rng.multinomial(2, [0.5, 0.5], size=9) / 2
        drawn.append(spearmanr(*np.einsum("ms,msv->mv", of_seeds, values[turns]).T).statistic)
    assert (own["low"], own["high"]) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))), abs=0.05)
    for point in points:
        point["net_recovery"] = {"value": float(point["label"][-1])}
        point["rise_nats"] = {"value": -float(point["label"][-1])}
    exact = correlations(points, resamples=1000, seed=0)["net_recovery"]
    assert (exact["value"], exact["low"], exact["high"]) == pytest.approx((-1, -1, -1))


def test_many_models_have_letters_and_use_has_a_panel(summaries):
    (point,) = points_of(summaries, names=["a"])
    points = [
        {
            **point,
            "label": f"encoding {number}",
            "rise_nats": interval(0.1 * number),
            "use_nats": interval(0.01 * number),
        }
        for number in range(10)
    ]
    settings = {"selector": "leave-one-out", "k": 4, "times": 4, "n_long": 128, "n_short": 16, "tau_nats": 1.0,
                "n_beyond": 512}  # fmt: skip
    found = {"settings": settings, "points": points,
             "correlations": correlations(points, resamples=1000, seed=0)}  # fmt: skip
    sparsity, use = joint_figure(found).axes
    assert "rank correlation 1.00 [1.00, 1.00], 10 models" in use.get_xlabel()
    assert "correlation" not in sparsity.get_xlabel(), "all have the same net recovery"
    assert [container[0].get_marker() for container in use.containers][:2] == [
        r"$\mathbf{A}$",
        r"$\mathbf{B}$",
    ]
    assert use.containers[3][0].get_xdata()[0] == pytest.approx(0.03)


def test_the_script_joins_draws_and_prints(folders, summaries, tmp_path, run_here):
    (tmp_path / "length.json").write_text(json.dumps(MEASURED))
    command = [*folders.values(), "--length", tmp_path, "--out", tmp_path / "out", "--resamples", 1000]
    printed = run_here(SCRIPT, *command).stdout
    assert "small, cross-fit" in printed and "4,000" in printed
    found = json.loads((tmp_path / "out" / "ladder.json").read_text())
    expected = [
        {**one, "records": str(f)} for one, f in zip(points_of(summaries), folders.values(), strict=True)
    ]
    assert found["points"] == expected
    assert (tmp_path / "out" / "ladder.png").stat().st_size > 10_000
    panels = ladder_figure(found).axes
    assert [axes.get_title("left")[:3] for axes in panels] == ["(a)", "(b)", "(c)", "(d)"]
    shares = [100 * summaries[name]["share_over_tau"]["value"] for name in "ac"]
    assert [container[0].get_ydata()[0] for container in panels[0].containers] == pytest.approx(shares)
    (line,) = [line for line in panels[3].lines if len(line.get_xdata()) == 2]
    assert list(line.get_xdata()) == [1000, 4000]
    assert list(line.get_ydata()) == [(0.4 + 0.5) / 2, 0.2]  # of b too, whose point is cross-fitted
    (axes,) = joint_figure(found).axes
    joint = {(container[0].get_xdata()[0], container[0].get_ydata()[0]) for container in axes.containers}
    assert joint == {(100 * p["net_recovery"]["value"], p["rise_nats"]["value"]) for p in found["points"]}


def test_records_of_scaled_rope_are_joined_with_the_loss_of_the_same_scaling(summaries):
    def with_scaling(scaling):
        settings = {**summaries["a"]["settings"], "options": {"rope_scaling": scaling}}
        return {"a": {**summaries["a"], "settings": settings}}

    (point,) = points_of(with_scaling({"name": "yarn"}), names=["a"])
    assert point["label"] == "small, YaRN" and point["rise_nats"]["value"] == 0.1
    with pytest.raises(UserError, match="was not measured by position; .* scaled as in the records"):
        points_of(with_scaling({"name": "ntk"}), names=["a"])


def test_plain_and_scaled_rope_of_one_checkpoint_both_show_their_rise(summaries):
    points = points_of(summaries, names=["a", "c"])
    points.append({**points[0], "label": "small, YaRN", "rise_nats": interval(0.1)})
    settings = {
        "selector": "leave-one-out",
        "k": 4,
        "times": 4,
        "n_long": 128,
        "n_short": 16,
        "tau_nats": 1.0,
    }
    rises = ladder_figure({"settings": settings, "points": points}).axes[3].containers
    assert sorted(float(container[0].get_ydata()[0]) for container in rises) == [0.1, 0.2, 0.4]


def test_models_of_one_size_have_the_joint_figure_only(folders, tmp_path, run_here):
    (tmp_path / "length.json").write_text(json.dumps(MEASURED))
    run_here(
        SCRIPT,
        folders["a"],
        folders["ab"],
        "--length",
        tmp_path,
        "--out",
        tmp_path / "out",
        "--resamples",
        1000,
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "joint.pdf",
        "joint.png",
        "ladder.json",
    ]


def test_records_of_different_contexts_are_refused(folders, tmp_path, run_here):
    rng = np.random.default_rng(0)
    manifest = made_up_manifest(200, checkpoint_sha256=SHAS["c"], n_long=64)
    write_records(tmp_path / "other", manifest, made_up_targets(200, 30, rng), rng)
    (tmp_path / "length.json").write_text(json.dumps(MEASURED))
    both = (folders["a"], tmp_path / "other")
    refused = run_here(SCRIPT, *both, "--length", tmp_path, "--out", tmp_path / "out", "--resamples", 1000)
    assert "the records have different N, M and tau" in refused.stderr
    assert not (tmp_path / "out").exists()
