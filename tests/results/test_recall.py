"""Recall of planted tokens (`results/synthetic/recall.py`), against sets built one sample at a time."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.model.losses import Scorer
from olmo_sparsity.tasks import make_task

RECALL = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "results" / "synthetic" / "recall.py"))
)
ON, ZERO, ONE = 2, 3, 4
PARITY = make_task("sparse_parity", {"train_length": [8, 14], "k_train": 3})
PLANTED = make_task("planted", {"train_length": [8, 14], "k_train": 3})
DIGIT = 9  # the planted symbol 0
SURE = 8.0


def parity(seen):
    """The label of the tokens that are seen, {column: token}; None where the bit of a selected pair is missing."""
    bits = [seen.get(column + 1) for column, token in seen.items() if column % 2 == 0 and token == ON]
    return None if None in bits else ZERO + bits.count(ONE) % 2


def careless_parity(seen):
    """Wrong where the first bit is 1."""
    label = parity(seen)
    return label if label is None or seen.get(1) != ONE else ZERO + ONE - label


def sum_of_three(seen):
    """The label of `planted` with p = 3; None where one of the three is missing."""
    values = [token - DIGIT for token in seen.values() if token >= DIGIT]
    return None if len(values) < 3 else DIGIT + sum(values) % 2


def logits_of(solve, vocabulary, seen):
    logits = np.zeros(vocabulary, dtype=np.float32)
    if (label := solve(seen)) is not None:
        logits[label] = SURE
    return logits


class Solver:
    """A model that answers by rule from the tokens it sees: surely, or not at all."""

    def __init__(self, solve, task):
        self.solve, self.vocabulary = solve, len(task.vocabulary)

    def __call__(self, input_ids, position_ids, *, logits_to_keep):
        rows = [
            logits_of(self.solve, self.vocabulary, dict(zip(ids, tokens, strict=True)))
            for ids, tokens in zip(position_ids.tolist(), input_ids.tolist(), strict=True)
        ]
        return SimpleNamespace(logits=torch.from_numpy(np.stack(rows))[:, None])


def settings_for(task, **changes):
    settings = {"length": 12, "planted": (3,), "samples": 8, "selectors": ("leave-one-out",)}
    return RECALL.RecallSettings(**{**settings, **changes}).for_task(task)


def left_out(loss, tokens, n_far):
    """Far columns in the order of loss(without the column), ties in the order of the text."""
    everything = dict(enumerate(tokens))
    without = [loss({c: t for c, t in everything.items() if c != left}) for left in range(n_far)]
    return sorted(range(n_far), key=lambda column: (-round(without[column], 5), column))


def shares(order, planted, ks):
    """Share of the planted columns among the first k of an order, as sets; a list over k."""
    return [len({*planted} & {*order[:k]}) / len(planted) for k in ks]


def assert_recalls(accuracy, recalls, planted, logits, task, settings):
    """Accuracy and recalls of leave-one-out again: logits(seen) of one sample with one dropped token at a time."""
    samples = RECALL.draw_samples(task, settings, planted)
    expected = {"token_recall": [], "token_placebo_recall": []}
    bits = {symbol: [] for symbol in (ZERO, ONE)}
    right = []
    both = (
        ("", samples.contexts, samples.planted),
        ("placebo_", samples.placebos, samples.planted[samples.donors]),
    )
    for row, label in enumerate(samples.contexts.targets[:, 0].tolist()):

        def loss(seen, label=label):
            values = logits(seen).astype(float)
            return np.log(np.exp(values).sum()) - values[label]

        right.append(int(logits(dict(enumerate(samples.contexts.tokens[row].tolist()))).argmax()) == label)
        for kind, contexts, columns in both:
            tokens, at = contexts.tokens[row].tolist(), columns[row].tolist()
            order = left_out(loss, tokens, contexts.n_far)
            expected[f"token_{kind}recall"].append(shares(order, at, settings.ks))
            for column in at if task is PARITY and not kind else ():
                bits[tokens[column]].append([column in order[:k] for k in settings.ks])
    assert accuracy["value"][accuracy["planted"] == planted].tolist() == [np.mean(right)]
    expected |= {"token_recall_of_0": bits[ZERO], "token_recall_of_1": bits[ONE]}
    of_selector = recalls[(recalls["planted"] == planted) & (recalls["selector"] == "leave-one-out")]
    for kind, values in expected.items():
        if values:
            recalled = of_selector["value"][of_selector["name"] == kind].tolist()
            assert recalled == pytest.approx(np.mean(values, axis=0).tolist()), kind


@pytest.mark.parametrize(
    ("task", "solve"), [(PARITY, parity), (PARITY, careless_parity), (PLANTED, sum_of_three)]
)
def test_recalls_are_those_of_sets_built_by_leaving_out_one_token_of_one_sample(task, solve):
    settings = settings_for(task)
    accuracy, recalls = RECALL.measure_recall(
        Scorer(Solver(solve, task), share_prefixes=False), task, settings
    )
    assert settings.ks == (1, 2, 4, 8)
    assert (accuracy["value"][0] < 1) == (solve is careless_parity)
    assert_recalls(
        accuracy, recalls, 3, lambda seen: logits_of(solve, len(task.vocabulary), seen), task, settings
    )


def test_samples_have_all_planted_tokens_far_and_a_placebo_of_another_label():
    settings = settings_for(PARITY, samples=30)
    samples, sized = RECALL.draw_samples(PARITY, settings, 3), PARITY.at_length(12, 3)
    looked_at = sized.sample("test", 0, range(samples.drawn))
    kept = [i for i in range(samples.drawn) if set(looked_at.planted[i]) <= set(range(10))]
    assert kept == samples.contexts.target_id[:, 0].tolist() and 30 == len(kept) < samples.drawn
    assert samples.contexts.tokens.tolist() == looked_at.tokens[kept, :12].tolist()
    assert samples.planted.tolist() == looked_at.planted[kept].tolist()
    for row in range(30):
        label, donor = samples.contexts.targets[row, 0], samples.donors[row]
        assert parity(dict(enumerate(samples.contexts.tokens[row]))) == label == looked_at.label[kept[row]]
        assert samples.placebos.targets[row] == label
        assert samples.placebos.tokens[row, :10].tolist() == looked_at.tokens[kept[donor], :10].tolist()
        placebo = dict(enumerate(samples.placebos.tokens[row]))
        assert parity(placebo) == ZERO + ONE - label  # its planted tokens say the opposite
        on = [column + 1 for column, token in placebo.items() if column % 2 == 0 and token == ON]
        assert on == samples.planted[samples.donors][row].tolist()
