"""The benchmarks: tiny runs of each, the plain ways they compare with, and what their numbers follow from."""

import json
import statistics
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.measure.influence import measure_influence
from analysis.measure.selectors import Selection
from analysis.measure.settings import InfluenceSettings as MeasureSettings
from analysis.model.adapters import OlmoForAnalysis
from analysis.model.load import load_for_analysis
from analysis.model.scorer import Scorer
from analysis.records.store import load_records
from analysis.stats.summary import summarize
from olmo_sparsity.config.load import load_config
from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.data import task_batches
from olmo_sparsity.tasks import TASKS
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.errors import UserError
from tests.support import tiny, tiny_task
from tests.support.corpora import some_files
from tests.support.measured import influence_settings, masked_loss, random_contexts
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as scripts/benchmark.py finds its modules

from benchmarks import encodings, influence, influence_screened, length, loss_memory, synthetic, tables  # noqa: E402
from benchmarks.plain_loop import PLAIN_SELECTORS, PlainLoop, plain_selection  # noqa: E402
from benchmarks.settings import EncodingsSettings, InfluenceSettings, LengthSettings, SyntheticSettings  # noqa: E402
from benchmarks.timing import chosen_device, summarise, time_in_turn  # noqa: E402
from benchmarks.trainer import LEARNING_RATE  # noqa: E402

N, M = 24, 6
FAR = N - M


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    """Batches of 8 samples are made two at once; the benchmark's setting of DeepSpeed ends with the test."""
    monkeypatch.setattr(task_batches, "_SAMPLES_AT_ONCE", 16)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="module")
def model():
    return OlmoForAnalysis(tiny.model()).requires_grad_(False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that learned a little to copy, and its corpus."""
    folder = tmp_path_factory.mktemp("trained")
    train(tiny.train_config(folder, "--max_duration=150", "--optimizer.learning_rate=1e-2"))
    return folder


@pytest.fixture
def benchmark(run_here, capsys):
    """Runs scripts/benchmark.py in this process; its JSON, after its tables were printed too."""

    def run(*arguments):
        done = run_here("scripts/benchmark.py", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert "torch" in result["machine"] and " ".join(map(str, arguments)) in result["command"]
        tables.print_tables(result)
        assert result["benchmark"] in capsys.readouterr().out
        for row in result.get("results", {}).values():
            assert row["rate"] > 0 and row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        if "results" in result:
            assert result["results"][result["baseline"]]["ratio"] == 1
        return result

    return run


# Timing.


def test_rounds_are_timed_in_turn_and_paired():
    now = [0.0]
    calls = []

    def runner(name, seconds):
        upcoming = iter(seconds)

        def run():
            calls.append(name)
            now[0] += next(upcoming)

        return run

    runners = {"plain": runner("plain", [9, 8, 6, 20]), "engine": runner("engine", [9, 2, 1, 10])}
    seconds = time_in_turn(runners, 3, warm_up=1, clock=lambda: now[0])
    assert seconds == {"plain": [8, 6, 20], "engine": [2, 1, 10]}  # without the warm-up
    assert sorted(calls[:2]) == sorted(calls[2:4]) == ["engine", "plain"]
    row = summarise(seconds, baseline="plain", amount=16, unit="targets/s")["results"]["engine"]
    assert row == {"rate": 8, "ratio": 4, "ratio_low": 2, "ratio_high": 6}


# train and data.


@pytest.mark.slow
def test_everything_is_timed_on_the_same_shape(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_memory, "VOCABULARIES", (256,))
    tiny.train_config(tmp_path, compile={"backend": "eager"})
    found = benchmark("train", "--config", tmp_path / "config.yaml", "--rounds", 2, "--steps", 1)
    assert (found["baseline"], found["window"]) == ("olmo", 32)
    sides = {"loop", "loop, compiled", "transformers Trainer", "transformers Trainer, compiled"}
    assert set(found["results"]) == {"olmo", "position_ids", *sides}
    loop = found["results"]["loop"]
    share = loop["rate"] * found["flops_per_token"] / 1e12 / found["matrix_product_tflops"]
    assert loop["share_of_matrix_product"] == pytest.approx(share)
    ratios = [
        x / y for x, y in zip(found["seconds"]["transformers Trainer"], found["seconds"]["loop"], strict=True)
    ]
    assert loop["to transformers Trainer"]["ratio"] == pytest.approx(statistics.median(ratios))
    assert set(found["loss_memory"]) == {"256"}


@pytest.mark.slow
def test_preparation_is_timed_beside_datasets_map(benchmark, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found = benchmark("data", "--rounds", 1, "--files", *some_files(tmp_path / "text", files=2))
    assert found["baseline"] == "datasets.map" and found["tokens"] > 1000
    assert set(found["results"]) >= {"datasets.map", "prepare_data"}


# length.


@pytest.fixture
def of_length(tmp_path):
    tiny.train_config(tmp_path)
    return LengthSettings(config=str(tmp_path / "config.yaml"), length=8, windows=2, rounds=1, device="cpu")


def test_both_ways_are_the_loss_of_each_token_given_those_before_it(of_length):
    losses = length.TokenLosses(influence.load_model(of_length), device="cpu")
    tokens = np.random.default_rng(0).integers(1, 50, (2, 9))
    expected = []
    for row in tokens.tolist():
        with torch.no_grad():
            logits = losses.model(torch.tensor([row]), position_ids=torch.arange(9)[None]).logits[0]
        log_p = logits.double().log_softmax(-1)
        expected.append([-float(log_p[place - 1, row[place]]) for place in range(1, 9)])
    for way in (length.plain_losses, length.window_losses):
        assert way(losses, tokens) == pytest.approx(np.array(expected), abs=1e-5)


def test_losses_that_differ_are_not_timed(of_length, monkeypatch):
    original = length.plain_losses
    monkeypatch.setattr(length, "plain_losses", lambda *rest: original(*rest) + 2e-4)
    monkeypatch.setattr(length, "time_in_turn", None)
    with pytest.raises(UserError, match="the losses differ by 2.0e-04 nats"):
        length.run(of_length)


def test_loss_by_position_is_timed(benchmark, of_length):
    found = benchmark("length", "--config", of_length.config, "--length", 12, "--windows", 2, "--rounds", 2)
    assert (found["baseline"], found["rounds"]) == (length.PLAIN, 2)
    assert found["largest_difference_nats"] < 1e-4


# influence.


make_contexts = partial(random_contexts, N, M)


def test_the_plain_loop_computes_the_losses_of_the_scorer_and_of_masking(model):
    contexts = make_contexts()
    generator = np.random.default_rng(1)
    for count in (0, 5, FAR):
        far = np.sort(generator.choice(FAR, count, replace=False))
        kept = np.append(far, range(FAR, N))
        losses = Scorer(model).losses(contexts, far[None])[:, 0]
        for row in range(len(contexts)):
            plain = PlainLoop(model, "cpu", contexts, row).loss_nats(kept.tolist())
            assert plain == pytest.approx(losses[row], abs=2e-5)
            assert plain == pytest.approx(masked_loss(model, contexts, row, kept), abs=2e-5)


@pytest.mark.parametrize("name", PLAIN_SELECTORS)
def test_the_plain_loop_chooses_as_the_engine_does(model, name):
    contexts = make_contexts()
    plain = plain_selection(name, model, "cpu", 5, contexts)
    chosen = influence.select(name, Scorer(model), 5, contexts)
    np.testing.assert_array_equal(plain.columns, chosen.columns)
    np.testing.assert_allclose(plain.influence, chosen.influence, atol=2e-5)


def test_the_plain_loop_makes_one_pass_per_candidate_and_asks_for_all_logits(model):
    seen = []

    def spy(input_ids, position_ids, *, logits_to_keep):
        seen.append((*input_ids.shape, logits_to_keep))
        return model(input_ids, position_ids, logits_to_keep=logits_to_keep)

    plain_selection("leave-one-out", spy, "cpu", 5, make_contexts(1))
    assert seen == [(1, N, 0)] + FAR * [(1, N - 1, 0)]


def test_differences_between_selections_are_told():
    columns = np.array([[3, 1, 2], [3, 1, 2], [3, 1, 2], [3, 1, 2]])
    plain = [Selection(columns, np.array([[3.0, 2.0, 1.0]] * 4))]
    same = influence.compare_selections(plain, plain, 2)
    assert same == {"same_set": 1, "same_order": 1, "largest_influence_difference_nats": 0}
    # row 1: another order; row 2: another set; row 3: the same two, what lies behind them does not count
    other = np.array([[3, 1, 2], [1, 3, 2], [3, 2, 1], [3, 1, 0]])
    moved = np.array([[3.0, 2.0, 1.0], [3.0, 2.5, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 9.0]])
    found = influence.compare_selections(plain, [Selection(other, moved)], 2)
    # row 1: token 1 has 3 instead of 2, token 3 has 2.5 instead of 3; row 2: token 2 has 2 instead of 1
    assert found == {"same_set": 0.75, "same_order": 0.5, "largest_influence_difference_nats": 1.0}


def test_tokens_are_counted(model):
    contexts = make_contexts(2)

    def tokens(name, **options):
        with influence_screened.counted_tokens(model) as counts:
            influence.select(name, Scorer(model, **options), 3, contexts)
        return sum(counts)

    assert tokens("leave-one-out", share_prefixes=False) == 2 * (FAR * (N - 1) + N)
    assert tokens("leave-one-out") < 2 * (FAR * (N - 1) + N)
    assert tokens("leave-one-in", share_prefixes=False) == 2 * (FAR * (M + 1) + M)
    rounds = FAR * (M + 1) + (FAR - 1) * (M + 2) + (FAR - 2) * (M + 3)
    assert tokens("greedy", share_prefixes=False) == 2 * (rounds + M)
    assert tokens("attention") == 2 * N
    assert tokens("gradient") == 3 * 2 * N  # the backward pass counts as two forward passes


def settings_of_influence(**changes):
    values = {"out": Path("unused"), "n_long": N, "n_short": M, "parts": ("speed",)}
    return InfluenceSettings(**{**values, **changes})


def test_contexts_are_stretches_of_held_out_documents_or_random_tokens(trained):
    loaded, corpus = load_for_analysis(trained / "run"), str(trained / "corpus")
    held_out = TokenFiles.of_split(corpus, "heldout")
    texts = [held_out.document(number).tolist() for number in range(len(held_out.document_bounds))]
    for source in (corpus, None):
        contexts = influence.contexts_of(loaded, settings_of_influence(checkpoint="run", corpus=source), 5)
        assert contexts.tokens.shape == (5, N) and contexts.n_far == FAR
        for tokens, target in zip(contexts.tokens.tolist(), contexts.targets.tolist(), strict=True):
            found = [*tokens, *target] in [
                text[i : i + N + 1] for text in texts for i in range(len(text) - N)
            ]
            assert found == (source is not None)


def test_a_sweep_varies_one_thing_at_a_time():
    settings = settings_of_influence(n_long=64, n_short=8, lengths=(32, 64), ks=(1, 16), counts=(1, 4))
    sweeps = influence.cost_sweeps(settings)
    for name, wanted in {"n_long": [32, 64], "k": [1, 16], "targets": [1, 4]}.items():
        own = [point for point in sweeps[name] if point.selector == "greedy"]
        assert [getattr(point, name) for point in own] == wanted
        usual = {"n_long": 64, "n_short": 8, "k": 8, "targets": 1}
        rest = [{key: value for key, value in vars(point).items() if key in usual} for point in own]
        assert all({**each, name: usual[name]} == usual for each in rest)


def test_a_selector_that_a_later_part_does_not_know_is_refused_first(tmp_path):
    settings = InfluenceSettings(out=tmp_path, selectors=("leave-one-out-k1",))
    with pytest.raises(UserError, match="unknown selector 'leave-one-out-k1'.*did you mean leave-one-out-kl"):
        influence.run(settings)


@pytest.mark.slow
def test_all_parts_of_the_influence_benchmark(benchmark, trained, tmp_path):
    sizes = ["--n-long", 48, "--n-short", M, "--targets", 2, "--sampled-targets", 64]
    sizes += ["--tau", 0.05, "--repeats", 2]
    sweeps = ["--lengths", 48, "--k", 8, "--counts", 1]  # one point per selector
    source = [trained / "run", "--corpus", trained / "corpus", "--device", "cpu"]
    result = benchmark("influence", *source, "--out", tmp_path, *sizes, *sweeps)
    assert json.loads((tmp_path / "influence.json").read_text()) == result
    assert set(result["speed"]["selectors"]) == set(PLAIN_SELECTORS)
    for timed in result["speed"]["selectors"].values():
        assert timed["results"]["plain loop"]["ratio"] == 1
        assert {len(seconds) for seconds in timed["seconds"].values()} == {2}
        for exact in ("engine", "engine, prefixes not shared"):
            assert timed["selections"][exact]["same_set"] == 1
            assert timed["selections"][exact]["largest_influence_difference_nats"] < 1e-4
        assert timed["selections"]["engine, bf16"]["largest_influence_difference_nats"] > 1e-4
    for sweep in result["cost"]["sweeps"].values():
        assert [point["selector"] for point in sweep] == list(influence.COST_SELECTORS)
        assert all(point["seconds_per_target"] > 0 for point in sweep)
    assert (tmp_path / "cost.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "cost.pdf").exists()


def test_blocks_agree_with_the_plain_loop_and_are_compared_on_the_same_targets(benchmark, trained, tmp_path):
    sizes = ["--n-long", 20, "--n-short", M, "--targets", 2, "--targets-per-block", 5, "--repeats", 2]
    options = ["--parts", "blocks,agreement", "--sampled-targets", 60, "--tau", 0.05, *sizes]
    source = [trained / "run", "--corpus", trained / "corpus", "--device", "cpu"]
    result = benchmark("influence", *source, "--out", tmp_path, *options)
    for name in ("leave-one-out", "leave-one-in"):
        timed = result["blocks"][name]
        assert timed["same_set"] == 1 and timed["largest_influence_difference_nats"] < 1e-4
        assert timed["results"]["plain loop"]["ratio"] == 1
        assert timed["share_of_matrix_product"] > 0
    found = result["agreement"]
    assert min(found[f"B = {size}"]["over_tau"] for size in (1, 5)) > 0
    shape = {"n_long": 20, "n_short": M, "ks": MeasureSettings.ks, "targets": 60, "targets_per_block": 5}
    settings = influence_settings(trained, tmp_path / "records", selectors=("leave-one-out",), **shape)
    summary = summarize(load_records(measure_influence(settings)), resamples=1000)
    net = found["B = 5"]["net_recovery"]
    for k, expected in summary["selectors"]["leave-one-out"].items():
        assert net[k]["value"] == pytest.approx(expected["net_recovery"]["value"], abs=1e-4)


@pytest.mark.slow
def test_cost_counts_the_tokens_of_any_selector(benchmark, tmp_path):
    """Without shared prefixes gradient and its 8 passes would read 3 N + 8 (N - 1) + N tokens."""
    config = tiny.write_yaml(tmp_path, tmp_path / "no-corpus")
    sizes = ["--n-long", N, "--n-short", M, "--parts", "cost", "--lengths", N, "--k", 8, "--counts", 1]
    chosen = ["--selectors", "leave-one-out,leave-one-out@gradient:8", "--repeats", 1, "--device", "cpu"]
    options = ["--out", tmp_path, *sizes, *chosen]
    result = benchmark("influence", "--config", config, *options)
    exact, screened = result["cost"]["sweeps"]["n_long"]
    assert 3 * N < screened["tokens_per_target"] < 3 * N + 8 * (N - 1) + 2 * N < exact["tokens_per_target"]
    plain = (N - M) * (N - 1) + N
    assert exact["plain_loop_tokens_ratio"] == pytest.approx(plain / exact["tokens_per_target"])
    (tmp_path / "small").mkdir()
    small = tiny.write_yaml(tmp_path / "small", tmp_path / "no-corpus", model={"n_layers": 1})
    proposed = benchmark("influence", "--config", config, *options, "--propose-with", small)
    exact_again, cheaper = proposed["cost"]["sweeps"]["n_long"]
    tokens, sizes = cheaper["tokens_of_models"], cheaper["parameters_of_models"]
    assert sizes[1] < sizes[0] and exact_again["tokens_per_target"] == exact["tokens_per_target"]
    assert cheaper["tokens_per_target"] == pytest.approx(tokens[0] + tokens[1] * sizes[1] / sizes[0])
    assert tokens[1] == 3 * N and 0 < tokens[0] < 8 * (N - 1) + 2 * N


@pytest.mark.slow
def test_selectors_side_by_side_recover_what_influence_measures(benchmark, trained, tmp_path):
    """The same targets, selectors and seed as `measure_influence`, and costs that grow with m."""
    sizes = ["--n-long", 28, "--n-short", M, "--sampled-targets", 40, "--tau", 0.05, "--parts", "screened"]
    source = [trained / "run", "--corpus", trained / "corpus", "--device", "cpu"]
    result = benchmark("influence", *source, "--out", tmp_path, *sizes)["screened"]
    names = ("leave-one-out", "greedy", "attention", "leave-one-out@spans:8")
    shape = {"n_long": 28, "n_short": M, "ks": MeasureSettings.ks, "targets": 40}
    settings = influence_settings(trained, tmp_path / "records", selectors=names, **shape)
    summary = summarize(load_records(measure_influence(settings)), resamples=1000)
    assert result["over_tau"] == summary["targets_over_tau"] > 0
    for name in names:
        for k, expected in summary["selectors"][name].items():
            for measure in ("recovery", "placebo_recovery", "net_recovery"):
                found = result["selectors"][name][measure][k]
                assert found["value"] == pytest.approx(expected[measure]["value"], abs=1e-4)
    rows = result["selectors"]
    assert "leave-one-out@gradient:32" not in rows  # there are fewer far tokens
    assert rows["leave-one-out"]["net_recovery_kept"]["4"]["value"] == pytest.approx(1)
    some = benchmark("influence", *source, "--out", tmp_path / "some", *sizes, "--selectors", "attention")
    assert list(some["screened"]["selectors"]) == ["leave-one-out", "attention"]
    assert some["screened"]["selectors"]["attention"]["recovery"] == rows["attention"]["recovery"]
    costs = [
        rows[name]["tokens_per_target"] for name in ("attention", "gradient", "leave-one-out@attention:16")
    ]
    assert 0 < costs[0] < costs[1] < costs[2] < rows["leave-one-out"]["tokens_per_target"]
    assert (tmp_path / "pareto.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": ("spede",)}, "--parts has no 'spede'"),
        ({"n_short": 24}, "--n-short 24"),
        ({"parts": ("cost",), "lengths": (5, 128)}, "--n-short 6"),
        ({"parts": ("cost",), "ks": (1, 400)}, "--k 400"),
        ({"parts": ("agreement",), "targets_per_block": 1}, "--targets-per-block 1 is no block"),
    ],
)
def test_bad_settings_are_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message):
        settings_of_influence(**changes)


# synthetic.


def write_configs(folder):
    """A config of a task, and one of another task beside it."""
    tiny_task.write(folder).rename(folder / "scratchpad_parity-x.yaml")
    (folder / "copy-x.yaml").write_text(
        "base: scratchpad_parity-x.yaml\ntask: {name: copy, parameters: {num_symbols: 7}}\n"
        "model: {vocab_size: 11, d_model: 32}\npositions: {table_size: 17}\n"
    )


def test_tasks_and_steps_are_timed(benchmark, tmp_path):
    path = tmp_path / "scratchpad_parity-x.yaml"
    write_configs(tmp_path)
    result = benchmark("synthetic", "--config", path, "--rounds", 2, "--steps", 1)
    assert set(result["tasks"]) == {"scratchpad_parity", "copy"} < set(TASKS)
    for row in result["tasks"].values():
        made, step = row["seconds"]["generate"], row["seconds"]["step"]
        shares = [one / other for one, other in zip(made, step, strict=True)]
        assert (row["share_low"], row["share_high"]) == pytest.approx((min(shares), max(shares)))
        assert row["steps_per_timing"] == 2, "what is made at once is made in one timing"
        assert row["samples_per_second"] == pytest.approx(16 / statistics.median(made))
        assert row["scheme"] == "predicted"
    steps = result["steps"]
    assert steps["scheme"] == "pose", "the Trainer knows no joint loss"
    losses = steps["losses_nats"]
    assert losses["loop"] == pytest.approx(losses["transformers Trainer"], rel=1e-5)
    assert len(losses["loop"]) == 3 and losses["loop"][0] != losses["loop"][1]
    assert steps["results"]["loop"]["rate"] == pytest.approx(2 / statistics.median(steps["seconds"]["loop"]))


def comparison(folder, **changes):
    config = tiny_task.config(folder, **changes)
    return synthetic.StepComparison(config, steps=1, folder=folder)


def test_both_sides_have_the_same_optimizer_and_precision(tmp_path):
    compared = comparison(tmp_path, optimizer={"betas": [0.8, 0.9], "eps": 1e-7})

    def settings(optimizer, model):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        kept = ("weight_decay", "betas", "eps", "fused", "amsgrad")
        return {
            names[id(parameter)]: [group[key] for key in kept]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    trainer = compared.trainer.trainer
    theirs = settings(trainer.optimizer, trainer.model)
    ours = settings(compared.engine.optimizer, compared.engine.raw_model.model)
    assert ours == theirs and len(ours) > 20
    assert theirs["gpt_neox.embed_in.weight"][0] == 0 and theirs["lm_head.weight"][0] == 0.1
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {LEARNING_RATE}
    assert trainer.args.max_grad_norm == compared.config.max_grad_norm == 1.0
    assert trainer.args.gradient_accumulation_steps == 2 and not trainer.args.bf16


def test_another_loss_is_found_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "time_in_turn", None)
    compared = comparison(tmp_path)
    with torch.no_grad():
        next(compared.engine.raw_model.parameters()).mul_(1.5)
    with pytest.raises(UserError, match="the losses differ: .* in the loop, .* in the Trainer"):
        compared.measure(rounds=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"name": "lionw"}}, r"optimizer\.name: the Trainer has AdamW; set it to adamw"),
        ({"model": tiny_task.OLMO}, r"model\.family: the Trainer has GPT-NeoX; set it to gpt_neox"),
        ({"device_train_microbatch_size": 3}, "3 does not divide 8; give one that does"),
        (
            {"model": dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.1)},
            r"model\.residual_dropout: .* set every dropout to 0",
        ),
        (None, r"task\.name: is missing; give a config of configs/synthetic"),
    ],
)
def test_what_the_trainer_cannot_be_given_is_refused(tmp_path, changes, message):
    if changes is None:
        path = tiny.write_yaml(tmp_path, tmp_path / "no-corpus")
    else:
        path = tiny_task.write(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        synthetic.run(SyntheticSettings(config=str(path), rounds=1, steps=1))


# --- profile ---


def test_a_profile_counts_what_a_step_does(benchmark, tmp_path):
    write_configs(tmp_path)
    path = tmp_path / "scratchpad_parity-x.yaml"
    config = load_config(path)
    parts = config.global_train_batch_size // config.device_train_microbatch_size
    found = benchmark("profile", "--config", path, "--compile=null", "--steps", 2, "--longest", 1000)
    calls = {name: row["calls"] for name, row in found["operations"].items()}
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert calls[attention] == calls[f"{attention}_backward"] == parts * config.model.n_layers
    assert calls["Optimizer.step#AdamW.step"] == 1
    times = [row["ms"] for row in found["operations"].values()]
    assert times == sorted(times, reverse=True) and sum(times) == pytest.approx(found["operations_ms"])
    assert not found["compiled"] and found["step_ms_low"] <= found["step_ms"] <= found["step_ms_high"]


# --- encodings ---


SMALL = tuple(
    f"--model.{each}"
    for each in ("d_model=32", "max_sequence_length=512", "vocab_size=128", "embedding_size=128")
)


@pytest.mark.slow
def test_encodings_are_timed_in_turn_and_attention_that_is_written_out_takes_more_memory():
    configs = tuple(str(ROOT / f"configs/length/{name}.yaml") for name in ("rope", "fox"))
    batch = ("--global_train_batch_size=4", "--device_train_microbatch_size=4")
    overrides = (*SMALL, *batch, "--precision=fp32")  # a process has one, and other tests have chosen it
    found = encodings.run(EncodingsSettings(configs=configs, rounds=2, steps=1, overrides=overrides))
    rope, fox = (found["results"][name] for name in configs)
    assert (rope["ratio"], rope["ratio_low"], rope["ratio_high"]) == (1, 1, 1)
    assert fox["ratio"] == statistics.median(
        a / b for a, b in zip(*(found["seconds"][name] for name in configs), strict=True)
    )
    scores = 4 * 2 * 512 * 512 * 4
    assert fox["step_bytes"] > rope["step_bytes"] + scores, "of one layer at least"
    assert found["baseline"] == configs[0] and (found["window"], found["batch"]) == (512, 4)


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert chosen_device() == "cpu"
    with refused("device 'cuda' cannot be used here"):
        chosen_device("cuda")


def test_encodings_of_different_windows_are_refused(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(f"base: {ROOT / 'configs/length/rope.yaml'}\nglobal_train_batch_size: 8\n")
    configs = (str(ROOT / "configs/length/rope.yaml"), str(other))
    with refused("the configs have different windows and batches"):
        encodings.run(EncodingsSettings(configs=configs, overrides=SMALL))
