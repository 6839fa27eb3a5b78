"""What records have beside the losses of S_k, against one plain forward pass for each subset, for B = 1 and B > 1."""

import numpy as np
import pytest
from scipy.stats import spearmanr

import analysis.measure.influence as measurement_module
from analysis.measure.faithfulness import Faithfulness, far_subsets, score_agreement, subset_influence
from analysis.measure.influence import measure_influence
from analysis.measure.selectors import Question, Selection, find_selector
from analysis.model.load import adapter_of
from analysis.model.scorer import Scorer
from analysis.records.store import load_records
from analysis.stats.summary import summarize
from analysis.text.contexts import Contexts
from olmo_sparsity.checkpoint import load_model
from olmo_sparsity.corpus.tokens import TokenFiles
from tests.support.measured import KS, M, N, placebo_window, plain_loss, read
from tests.support.measured import influence_settings as settings

FAR = N - M
SELECTORS = ("leave-one-out", "greedy", "leave-one-in", "attention", "leave-one-out@gradient:6", "random")
SUBSETS = 8


@pytest.fixture(scope="module", params=[1, 6])
def measured(trained, tmp_path_factory, request):
    """Records with B = 1 or 6, of the selectors above."""
    asked = settings(
        trained,
        tmp_path_factory.mktemp("measured"),
        targets_per_block=request.param,
        subsets=SUBSETS,
        selectors=SELECTORS,
    )
    return load_records(measure_influence(asked))


def test_losses_equal_plain_passes(trained, measured):
    """Subsets and what is left without S_k, of both far contexts; L_short with ids from 0."""
    model, _ = load_model(trained / "run")
    tokens, targets = TokenFiles.of_split(trained / "corpus", "heldout"), measured.targets
    per_block = measured.manifest.targets_per_block
    for row, at in list(enumerate(measured.over))[:6]:
        token, length = targets.token[at], read(measured, at)
        document, position = tokens.document(targets.document[at]), int(targets.position[at])
        true, short = document[position - length : position], list(range(FAR, length))
        alone = plain_loss(model, true[FAR:], range(length - FAR), token)
        assert targets.loss_short_from_0_nats[at] == pytest.approx(alone, abs=1e-4)
        subsets = far_subsets(FAR, SUBSETS, seed=0, block=int(targets.target_id[at]) // per_block)
        for far, text in (("true", true), ("placebo", placebo_window(measured, tokens, at))):
            long = plain_loss(model, text, range(length), token)
            expected = [plain_loss(model, text, [*subset, *short], token) for subset in subsets]
            for name in SELECTORS:
                further = {column: each[name][far][row] for column, each in measured.further.items()}
                assert further["subset_loss_nats"].tolist() == pytest.approx(expected, abs=1e-4)
                chosen = measured.selected[name][far][row].tolist()
                drops = [
                    plain_loss(model, text, [j for j in range(length) if j not in chosen[:k]], token) - long
                    for k in KS
                ]
                assert further["comprehensiveness_nats"].tolist() == pytest.approx(drops, abs=2e-4)


def test_leave_one_outs_sums_are_those_of_plain_influences(trained, measured):
    model, _ = load_model(trained / "run")
    tokens, targets = TokenFiles.of_split(trained / "corpus", "heldout"), measured.targets
    at = measured.over[0]
    text, length = placebo_window(measured, tokens, at), read(measured, at)
    long = plain_loss(model, text, range(length), targets.token[at])
    influence = [
        plain_loss(model, text, [j for j in range(length) if j != i], targets.token[at]) - long
        for i in range(FAR)
    ]
    block = int(targets.target_id[at]) // measured.manifest.targets_per_block
    expected = [sum(influence[i] for i in each) for each in far_subsets(FAR, SUBSETS, seed=0, block=block)]
    found = measured.further["subset_influence"]["leave-one-out"]["placebo"][0]
    assert found.tolist() == pytest.approx(expected, abs=1e-3)
    assert np.isnan(measured.further["subset_influence"]["greedy"]["true"]).all()
    agreement = measured.further["leave_one_out_spearman"]
    assert np.isnan(agreement["leave-one-out"]["true"]).all() and np.isnan(agreement["greedy"]["true"]).all()
    assert np.isfinite(agreement["random"]["true"]).all()


def test_subsets_are_distinct_halves_and_belong_to_the_block():
    subsets = far_subsets(15, 200, seed=3, block=7)
    assert subsets.shape == (200, 8) and (np.diff(subsets, axis=1) > 0).all()
    kept = np.bincount(subsets.ravel(), minlength=15) / 200
    assert np.abs(kept - 8 / 15).max() < 0.12
    assert np.array_equal(subsets[:50], far_subsets(15, 200, seed=3, block=7)[:50])
    for other in (far_subsets(15, 200, seed=3, block=8), far_subsets(15, 200, seed=4, block=7)):
        assert not np.array_equal(subsets, other)


def test_tokens_without_a_score_count_as_nothing():
    scores = np.array([[1.0, np.nan, 3.0, -0.5], [0.5, 0.25, np.nan, np.nan]])
    subsets = np.array([[[0, 1], [2, 3]], [[1, 2], [0, 3]]])
    assert subset_influence(scores, subsets).tolist() == [[1.0, 2.5], [0.25, 0.5]]
    columns, influence = np.zeros((2, 1), dtype=int), np.zeros((2, 1))
    chosen = {
        "leave-one-out": Selection(columns, influence, np.array([[4.0, 3, 2, 1], [1.0, 2, 3, 4]])),
        "screened": Selection(columns, influence, scores),
        "greedy": Selection(columns, influence),
    }
    found = score_agreement(chosen)
    expected = [
        spearmanr([4, 3, 2, 1], [1, 0, 3, -0.5]).statistic,
        spearmanr([1, 2, 3, 4], [0.5, 0.25, 0, 0]).statistic,
    ]
    assert list(found) == ["screened"] and found["screened"].tolist() == pytest.approx(expected)
    assert score_agreement({"greedy": chosen["greedy"], "screened": chosen["screened"]}) == {}


class Lookup:
    """A scorer whose p of the target is a function of the far tokens that are read, worked out by hand."""

    def __init__(self, probability):
        self.probability = probability

    def losses(self, contexts, far, asked):
        far = np.broadcast_to(far, (len(asked), *far.shape[-2:]))
        return -np.log([[self.probability(frozenset(each.tolist())) for each in row] for row in far])


def test_definitions_of_eraser_and_contextcite_by_hand():
    """Of four far tokens, 1 or 2 is enough (redundant), 3 helps a little: p 0.1, times 6 and 1.5; ranked 1, 3, 2, 0.

    ERASER (4.2), m a probability of the label: sufficiency m(x) - m(r), comprehensiveness m(x) - m(x without r).
    ContextCite (3.2): top-k drop log p(x) - log p(x without r). Ours: both, with m = log p.
    """

    def p(kept):
        return 0.1 * (6 if kept & {1, 2} else 1) * (1.5 if 3 in kept else 1)

    scorer, everything, ranked, ks = Lookup(p), frozenset(range(4)), [1, 3, 2, 0], (1, 2, 3)
    contexts = Contexts(
        np.zeros((1, 6), dtype=int), np.zeros((1, 1), dtype=int), np.zeros((1, 1), dtype=int), 2
    )
    asked, columns = np.array([[0, 0]]), np.array([ranked])
    chosen = {"leave-one-out": Selection(columns, columns * 1.0, np.array([[0.0, 0.0, 0.0, 0.4]]))}
    found = Faithfulness(scorer, ks, 5, 0).of_selections(contexts, asked, chosen)["leave-one-out"]
    drops = [np.log(p(everything)) - np.log(p(everything - {*ranked[:k]})) for k in ks]
    assert drops == pytest.approx([0.0, np.log(1.5), np.log(9)])  # the first is not missed: 2 says the same
    assert found["comprehensiveness_nats"][0].tolist() == pytest.approx(drops)
    lacks = [np.log(p(everything)) - np.log(p(frozenset(ranked[:k]))) for k in ks]
    assert lacks == pytest.approx([np.log(1.5), 0.0, 0.0])
    losses = measurement_module.selected_losses(scorer, contexts, asked, columns, ks)
    assert (losses - scorer.losses(contexts, np.arange(4)[None], asked))[0].tolist() == pytest.approx(lacks)
    kept = [frozenset(each) for each in far_subsets(4, 5, seed=0, block=0).tolist()]
    assert found["subset_loss_nats"][0].tolist() == pytest.approx([-np.log(p(each)) for each in kept])
    assert found["subset_influence"][0].tolist() == pytest.approx([0.4 * (3 in each) for each in kept])


def test_what_is_turned_off_is_null(trained, tmp_path):
    few = {"selectors": ("leave-one-out", "attention"), "targets": 20}
    only = load_records(measure_influence(settings(trained, tmp_path / "only", only_recovery=True, **few)))
    assert only.further == {} and only.targets.loss_short_from_0_nats is None
    assert only.manifest.options == {}
    assert summarize(only, 1000)["contexts"] == {"gap_cost_nats": None, "enough": None}
    asked = settings(trained, tmp_path / "subsets", subsets=0, **few)
    records = load_records(measure_influence(asked))
    assert "subset_loss_nats" not in records.further
    found = summarize(records, 1000)["faithfulness"]
    assert found["subsets"] is None
    for each in found["selectors"].values():
        assert each["lds"] is None and each["r2"] is None
    assert found["selectors"]["attention"]["comprehensiveness_nats"]["placebo"]["aopc"]["value"] is not None


def test_shorter_contexts_are_the_last_tokens(trained, tmp_path):
    """Those of 32 tokens, where N is 40: M' + b of them in a block, and none that is not below N."""
    asked = settings(
        trained, tmp_path, n_long=40, targets=12, targets_per_block=3, selectors=("random",), tau_nats=-9.0
    )
    targets = load_records(measure_influence(asked)).targets
    model, tokens = load_model(trained / "run")[0], TokenFiles.of_split(trained / "corpus", "heldout")
    for at in range(12):
        position, b = int(targets.position[at]), at % 3
        text = tokens.document(targets.document[at])[position - 40 - b : position]
        expected = plain_loss(model, text, range(8, 40 + b), targets.token[at])
        assert targets.loss_of_32_nats[at] == pytest.approx(expected, abs=1e-4)
    assert targets.loss_of_96_nats is None and targets.loss_of_256_nats is None


@pytest.mark.parametrize("name", ["leave-one-out", "leave-one-out@gradient:8", "spans"])
def test_scores_are_the_influence_of_every_token_that_has_one(trained, name):
    model, _ = load_model(trained / "run")
    text = np.random.default_rng(0).integers(1, 40, (2, 45))
    contexts = Contexts(text[:, :-1], text[:, -1:], np.arange(2)[:, None], 4)
    question = Question(Scorer(adapter_of(model, "m")), contexts, 0, 8)
    found = find_selector(name)(question)
    assert found.scores.shape == (2, 40)
    for row in range(2):
        best = np.argsort(-np.nan_to_num(found.scores[row], nan=-np.inf), kind="stable")[:8]
        assert best.tolist() == found.columns[row].tolist()
        assert found.scores[row, best].tolist() == found.influence[row].tolist()
    if name != "spans":
        assert np.isfinite(found.scores).sum(axis=1).tolist() == [8 if "@" in name else 40] * 2
