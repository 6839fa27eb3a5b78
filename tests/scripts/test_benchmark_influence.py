"""The influence benchmark: its plain loop, what it counts and compares, a tiny run, and the figure of its costs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from analysis.measure.selectors import Selection
from analysis.model.adapters import OlmoForAnalysis
from analysis.model.load import load_for_analysis
from analysis.model.scorer import Scorer
from analysis.plots.costs import cost_figure, load_cost
from analysis.text.contexts import Contexts
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.errors import UserError
from tests.support import tiny

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as scripts/benchmark.py finds its modules

from benchmarks import influence_cost, influence_speed  # noqa: E402
from benchmarks.influence import BenchmarkSettings, BenchmarkTargets, Subject, benchmark_targets  # noqa: E402
from benchmarks.plain_loop import PLAIN_SELECTORS, PlainLoop, plain_selection  # noqa: E402
from benchmarks.timing import summarise, time_in_turn  # noqa: E402

N, M = 24, 6
FAR = N - M


@pytest.fixture(scope="module")
def model():
    return OlmoForAnalysis(tiny.model()).requires_grad_(False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that learned a little to copy, and its corpus."""
    folder = tmp_path_factory.mktemp("trained")
    train(tiny.train_config(folder, "--max_duration=150", "--optimizer.learning_rate=1e-2"))
    return folder


def make_contexts(count=3, seed=0):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, 50, (count, N))
    return Contexts(tokens, generator.integers(1, 50, count), np.arange(count), M)


@torch.no_grad()
def hidden_loss(model, contexts, row, kept):
    """The whole context with all but the kept tokens hidden by an attention mask."""
    mask = torch.zeros(1, N, dtype=torch.long)
    mask[0, kept] = 1
    tokens = torch.from_numpy(contexts.tokens[row])[None]
    logits = model(tokens, torch.arange(N)[None], attention_mask=mask).logits[0, -1].double()
    return float(-logits.log_softmax(-1)[int(contexts.targets[row])])


def test_the_plain_loop_computes_the_losses_of_the_scorer_and_of_masking(model):
    contexts = make_contexts()
    generator = np.random.default_rng(1)
    for length in (M, 11, N):
        kept = np.sort(generator.choice(N - 1, length - 1, replace=False))
        kept = np.append(kept, N - 1)  # masking reads the loss at the last token
        losses = Scorer(model).losses(contexts, kept[None])[:, 0]
        for row in range(len(contexts)):
            plain = PlainLoop(model, "cpu", contexts, row).loss_nats(kept.tolist())
            assert plain == pytest.approx(losses[row], abs=2e-5)
            assert plain == pytest.approx(hidden_loss(model, contexts, row, kept), abs=2e-5)


@pytest.mark.parametrize("name", PLAIN_SELECTORS)
def test_the_plain_loop_chooses_as_the_engine_does(model, name):
    contexts = make_contexts()
    columns, influence = plain_selection(name, model, "cpu", contexts, 5)
    chosen = influence_speed.select(name, Scorer(model), 5, contexts)
    np.testing.assert_array_equal(columns, chosen.columns)
    np.testing.assert_allclose(influence, chosen.influence, atol=2e-5)


def test_the_plain_loop_makes_one_pass_per_candidate_and_asks_for_all_logits(model):
    seen = []

    def spy(input_ids, position_ids, *, last_logits_only):
        seen.append((*input_ids.shape, last_logits_only))
        return model(input_ids, position_ids, last_logits_only=last_logits_only)

    plain_selection("leave-one-out", spy, "cpu", make_contexts(1), 5)
    assert seen == [(1, N, False)] + FAR * [(1, N - 1, False)]


def test_differences_between_selections_are_told():
    columns = np.array([[3, 1, 2], [3, 1, 2], [3, 1, 2], [3, 1, 2]])
    influence = np.array([[3.0, 2.0, 1.0]] * 4)
    plain = [[Selection(columns, influence)]]
    same = influence_speed.compare_selections(plain, plain, 2)
    assert same == {"same_set": 1, "same_order": 1, "largest_influence_difference_nats": 0}
    # row 1: another order; row 2: another set; row 3: the same two, what lies behind them does not count
    other = np.array([[3, 1, 2], [1, 3, 2], [3, 2, 1], [3, 1, 0]])
    moved = np.array([[3.0, 2.0, 1.0], [3.0, 2.5, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 9.0]])
    found = influence_speed.compare_selections(plain, [[Selection(other, moved)]], 2)
    # row 1: token 1 has 3 instead of 2, token 3 has 2.5 instead of 3; row 2: token 2 has 2 instead of 1
    assert found == {"same_set": 0.75, "same_order": 0.5, "largest_influence_difference_nats": 1.0}


def test_tokens_are_counted(model):
    contexts = make_contexts(2)

    def tokens(name, **options):
        with influence_speed.counted_tokens(model) as counts:
            influence_speed.select(name, Scorer(model, **options), 3, contexts)
        return sum(counts)

    assert tokens("leave-one-out", share_prefixes=False) == 2 * (FAR * (N - 1) + N)
    assert tokens("leave-one-out") < 2 * (FAR * (N - 1) + N)
    assert tokens("leave-one-in", share_prefixes=False) == 2 * (FAR * (M + 1) + M)
    rounds = FAR * (M + 1) + (FAR - 1) * (M + 2) + (FAR - 2) * (M + 3)
    assert tokens("greedy", share_prefixes=False) == 2 * (rounds + M)
    assert tokens("attention") == 2 * N
    assert tokens("gradient") == 3 * 2 * N  # the backward pass counts as two forward passes


def test_net_recovery_kept_equals_plain_sums(model):
    true, placebo = make_contexts(4), make_contexts(4, seed=1)
    generator = np.random.default_rng(2)
    columns = {
        name: [np.stack([generator.permutation(FAR)[:4] for _ in range(4)]) for _ in range(2)]
        for name in ("leave-one-out", "leave-one-out@gradient:8")
    }
    gain = np.array([2.0, 1.5, 3.0, 1.2])
    targets = BenchmarkTargets(true, placebo, np.array([0, 0, 1, 2]), gain)
    found = influence_speed.net_recoveries(
        Scorer(model),
        (true, placebo),
        columns,
        (2, 4),
        targets,
        {"leave-one-out": ["leave-one-out@gradient:8"]},
    )

    def net(name, k):
        """Σ (L_short - L_k) / Σ gain, true minus placebo, one loss at a time."""
        recovered = []
        for contexts, chosen in zip((true, placebo), columns[name], strict=True):
            saved = 0.0
            for row in range(4):
                plain = PlainLoop(model, "cpu", contexts, row)
                kept = sorted([*chosen[row, :k].tolist(), *plain.short])
                saved += hidden_loss(model, true, row, plain.short) - plain.loss_nats(kept)
            recovered.append(saved / gain.sum())
        return recovered[0] - recovered[1]

    for k in (2, 4):
        exact, screened = net("leave-one-out", k), net("leave-one-out@gradient:8", k)
        form = found["leave-one-out@gradient:8"]
        assert form["net_recovery"][str(k)]["value"] == pytest.approx(screened, abs=1e-4)
        kept = form["net_recovery_kept"][str(k)]["value"]
        assert kept == (pytest.approx(screened / exact, rel=1e-2) if exact > 0 else None)
        assert found["leave-one-out"]["net_recovery"][str(k)]["value"] == pytest.approx(exact, abs=1e-4)


def test_targets_are_over_tau_and_their_placebos_come_from_elsewhere(trained):
    subject = Subject(str(trained / "run"), "unused")
    settings = BenchmarkSettings(
        subject, str(trained / "corpus"), n_long=N, n_short=M, targets=3, screened_targets=5, tau_nats=0.05
    )
    loaded = load_for_analysis(trained / "run")
    found = benchmark_targets(loaded, settings)
    assert len(found.contexts) == 5 and found.placebo is not None
    for row in range(5):
        plain = PlainLoop(loaded.model, "cpu", found.contexts, row)
        gain = plain.loss_nats(plain.short) - plain.loss_nats(plain.long)
        assert gain == pytest.approx(found.gain_nats[row], abs=1e-4) and gain > 0.05
    assert not np.array_equal(found.placebo.tokens[:, :FAR], found.contexts.tokens[:, :FAR])
    assert np.array_equal(found.placebo.tokens[:, FAR:], found.contexts.tokens[:, FAR:])


def test_rounds_are_timed_in_turn_and_paired(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("benchmarks.timing.time.perf_counter", lambda: now[0])
    calls = []

    def runner(name, seconds):
        upcoming = iter(seconds)

        def run():
            calls.append(name)
            now[0] += next(upcoming)

        return run

    runners = {"plain": runner("plain", [9, 8, 6, 20]), "engine": runner("engine", [9, 2, 1, 10])}
    seconds = time_in_turn(runners, 3, lambda: None, warm_up=1)
    assert seconds == {"plain": [8, 6, 20], "engine": [2, 1, 10]}  # without the warm-up
    assert sorted(calls[:2]) == sorted(calls[2:4]) == ["engine", "plain"]
    row = summarise(seconds, baseline="plain", amount=16, unit="targets/s")["results"]["engine"]
    assert row == {"rate": 8, "ratio": 4, "ratio_low": 2, "ratio_high": 6}


def test_a_sweep_varies_one_thing_at_a_time():
    settings = BenchmarkSettings(
        Subject(None, ""), None, n_long=64, n_short=8, lengths=(32, 64), ks=(1, 16), counts=(1, 4)
    )
    sweeps = influence_cost.cost_sweeps(settings)
    for name, wanted in {"n_long": [32, 64], "k": [1, 16], "targets": [1, 4]}.items():
        own = [point for point in sweeps[name] if point.selector == "greedy"]
        assert [getattr(point, name) for point in own] == wanted
        usual = {"n_long": 64, "n_short": 8, "k": 8, "targets": 1}
        rest = [{key: value for key, value in vars(point).items() if key in usual} for point in own]
        assert all({**each, name: usual[name]} == usual for each in rest)


def benchmark(*arguments):
    command = [sys.executable, "scripts/benchmark.py", "influence", *map(str, arguments), "--device", "cpu"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_whole_run(trained, tmp_path):
    sizes = ["--n-long", 48, "--n-short", M, "--targets", 2, "--screened-targets", 6, "--repeats", 2]
    sweeps = ["--lengths", 48, "--k", 8, "--counts", 1]  # one point per selector
    source = [trained / "run", "--corpus", trained / "corpus", "--tau", 0.05]
    done = benchmark(*source, "--out", tmp_path, *sizes, *sweeps, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "influence.json").read_text())
    assert json.loads(done.stdout) == result
    assert result["machine"]["torch"] == torch.__version__ and "--n-long 48" in result["command"]
    assert set(result["speed"]["selectors"]) == set(PLAIN_SELECTORS)
    for timed in result["speed"]["selectors"].values():
        assert timed["results"]["plain loop"]["ratio"] == 1
        assert {len(seconds) for seconds in timed["seconds"].values()} == {2}
        for exact in ("engine", "engine, prefixes not shared"):
            assert timed["selections"][exact]["same_set"] == 1
            assert timed["selections"][exact]["largest_influence_difference_nats"] < 1e-4
        assert timed["selections"]["engine, bf16"]["largest_influence_difference_nats"] > 1e-4
    screened = result["screened"]
    assert (screened["targets"], screened["rounds"]) == (6, 2)
    # 42 far tokens: every form fits
    wanted = {name for exact, forms in influence_speed.SCREENS.items() for name in (exact, *forms)}
    assert set(screened["selectors"]) == wanted
    for name, row in screened["selectors"].items():
        if name in influence_speed.SCREENS:
            assert row["seconds_ratio"] == {"ratio": 1, "ratio_low": 1, "ratio_high": 1}
            assert row["net_recovery_kept"]["8"]["value"] in (1, None)
    by_name = screened["selectors"]
    cheap, dear = (by_name[f"leave-one-out@attention:{m}"]["tokens_ratio"] for m in (8, 32))
    assert 0 < cheap < dear < 1
    for sweep in result["cost"]["sweeps"].values():
        assert [point["selector"] for point in sweep] == list(influence_cost.SELECTORS)
        assert all(point["seconds_per_target"] > 0 for point in sweep)
    assert (tmp_path / "cost.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "cost.pdf").exists()


def test_random_weights_have_costs_but_no_recovery(tmp_path, run_here):
    config = tiny.write_yaml(tmp_path, tmp_path / "no-corpus")
    sizes = ["--n-long", N, "--n-short", M, "--screened-targets", 2, "--parts", "screened"]
    options = ["--config", config, "--out", tmp_path, *sizes, "--device", "cpu", "--model.n_layers=1"]
    done = run_here("scripts/benchmark.py", "influence", *options)
    assert done.returncode == 0, done.stderr
    assert "leave-one-out@gradient:16" in done.stdout and "load average before" in done.stdout
    result = json.loads((tmp_path / "influence.json").read_text())
    assert "speed" not in result and "cost" not in result and not (tmp_path / "cost.png").exists()
    rows = result["screened"]["selectors"]
    assert "leave-one-out@gradient:32" not in rows  # there are 18 far tokens
    assert all("net_recovery" not in row for row in rows.values())
    # both read the long context once to propose; the gradient's backward pass counts too
    share = rows["leave-one-out@attention:8"]["tokens_per_context"]
    assert share < rows["leave-one-out@gradient:8"]["tokens_per_context"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": ("spede",)}, "--parts has no 'spede'"),
        ({"n_short": 64}, "--n-short 64"),
        ({"lengths": (32, 128)}, "--n-short 32"),
        ({"ks": (1, 400)}, "--k 400"),
        ({"repeats": 0}, "1 or more"),
        ({"corpus": "data"}, "--corpus needs a checkpoint"),
    ],
)
def test_bad_settings_are_refused_by_name(changes, message):
    values = {"subject": Subject(None, ""), "corpus": None, **changes}
    with pytest.raises(UserError, match=message):
        BenchmarkSettings(**values).check()


def made_up_result():
    def point(selector, n_long, k, targets, seconds, peak):
        shape = {"selector": selector, "n_long": n_long, "n_short": 32, "k": k, "targets": targets}
        return {**shape, "seconds_per_target": seconds, "peak_bytes": peak}

    sweeps = {
        "n_long": [point("leave-one-out", n, 8, 1, n / 100, n * 10**6) for n in (128, 256, 512)]
        + [point("greedy", n, 8, 1, n / 50, None) for n in (128, 256, 512)],
        "k": [point("leave-one-out", 256, k, 1, 2.56, 0) for k in (1, 4, 16)]
        + [point("greedy", 256, k, 1, 0.5 * k, 3 * 10**6) for k in (1, 4, 16)],
        "targets": [point("leave-one-out", 256, 8, n, 2.0 / n, 10**6 * n) for n in (1, 4)],
    }
    machine = {"gpu": None, "cores": 2, "processor": "x86_64", "threads": 1}
    return {
        "benchmark": "influence",
        "model": "a model",
        "parameters": 1000,
        "machine": machine,
        "cost": {"sweeps": sweeps},
    }


def test_the_figure_draws_the_json(tmp_path):
    (tmp_path / "influence.json").write_text(json.dumps(made_up_result()))
    figure = cost_figure(load_cost(tmp_path))
    assert isinstance(figure, Figure) and len(figure.axes) == 6

    def curve(panel, selector):
        (line,) = [each for each in figure.axes[panel].lines if each.get_label().startswith(selector)]
        return line.get_xdata(), line.get_ydata()

    np.testing.assert_allclose(curve(0, "leave-one-out"), ([128, 256, 512], [1.28, 2.56, 5.12]))
    np.testing.assert_allclose(curve(1, "greedy"), ([1, 4, 16], [0.5, 2, 8]))
    np.testing.assert_allclose(curve(3, "leave-one-out")[1], [128, 256, 512])  # MB
    assert np.isnan(curve(3, "greedy")[1]).all()  # not measured
    assert np.isnan(curve(4, "leave-one-out")[1]).all()  # no growth has no place on a logarithmic axis
    np.testing.assert_allclose(curve(5, "leave-one-out"), ([1, 4], [1, 4]))
    figure.canvas.draw()
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [axes.get_xlabel() for axes in figure.axes[3:]] == [
        "N [tokens of long context]",
        "k [selected tokens]",
        "targets at once",
    ]
    assert [figure.axes[panel].get_ylabel() for panel in (0, 3)] == ["seconds per target", "peak memory [MB]"]
    assert figure.axes[1].get_title(loc="left") == "N = 256, M = 32, targets = 1"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "missing"), ("{", "damaged"), ('{"benchmark": "influence", "speed": {}}', "holds no costs")],
)
def test_what_is_no_result_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "influence.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_cost(tmp_path)


def test_the_figure_needs_no_torch():
    code = "import sys, analysis.plots.costs; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
