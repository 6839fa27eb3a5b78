"""Document-masked attention: a packed window against each of its documents run alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from olmo.config import ActivationCheckpointingStrategy
from olmo.data.util import get_document_lengths

from olmo_sparsity.data.windows import TrainingData, document_ids, restarted_ids
from tests.support import tiny

LENGTHS = [(1, 9, 4, 6), (12, 1, 5, 2)]  # of the documents of two windows of 20 tokens, EOS included


def packed():
    """Two windows (B, T) of documents that each end with EOS but for the last, which the window cuts off."""
    ids = torch.randint(1, 50, (2, 20), generator=torch.Generator().manual_seed(1))
    for row, lengths in zip(ids, LENGTHS, strict=True):
        row[torch.tensor(lengths).cumsum(0)[:-1] - 1] = tiny.EOS
    return ids


def documents_of(ids):
    return torch.from_numpy(np.stack([document_ids(row.numpy(), tiny.EOS) for row in ids]))


def parts(lengths):
    ends = np.cumsum(lengths)
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def alone(model, ids, position_ids):
    """Logits of every document run alone at these ids, put together again."""
    rows = [
        torch.cat(
            [model(row[None, part], position_ids=places[None, part]).logits[0] for part in parts(lengths)]
        )
        for row, places, lengths in zip(ids, position_ids, LENGTHS, strict=True)
    ]
    return torch.stack(rows)


def window_ids(kind, documents):
    if kind == "restart":
        return torch.from_numpy(np.stack([restarted_ids(row.numpy()) for row in documents]))
    ids = torch.arange(20).expand(2, -1)
    return ids + (ids > 7) * 11 if kind == "pose" else ids  # the skip falls inside a document


def test_an_eos_belongs_to_the_document_it_ends():
    ids, documents = packed(), documents_of(packed())
    for row, window, lengths in zip(documents, ids, LENGTHS, strict=True):
        assert torch.bincount(row).tolist() == list(lengths)
        assert get_document_lengths(window, tiny.EOS).tolist() == list(lengths)  # as OLMo has them
    assert restarted_ids(documents[1].numpy()).tolist() == [*range(12), 0, *range(5), 0, 1]


@pytest.mark.parametrize(
    ("encoding", "kind"),
    [
        (encoding, kind)
        for encoding in sorted(tiny.ENCODINGS)
        for kind in ("window", "restart", "pose")
        if (encoding, kind) != ("learned", "pose")  # refused: no embedding is learned past the window
    ],
)
def test_a_packed_window_equals_its_documents_run_alone(encoding, kind):
    model, ids = tiny.model(**tiny.ENCODINGS[encoding]), packed()
    documents = documents_of(ids)
    places = window_ids(kind, documents)
    masked = model(ids, position_ids=places, document_ids=documents).logits
    torch.testing.assert_close(masked, alone(model, ids, places), atol=2e-5, rtol=1e-4)
    assert (masked - model(ids, position_ids=places).logits).abs().max() > 1e-2  # the mask does something


@pytest.mark.parametrize("strategy", [None, ActivationCheckpointingStrategy.whole_layer])
def test_gradients_are_those_of_the_documents_alone(strategy):
    ids, gradients = packed(), []
    documents = documents_of(ids)
    places = window_ids("restart", documents)
    for run in ("packed", "alone"):
        model = tiny.model().train()
        model.set_activation_checkpointing(strategy)
        if run == "packed":
            logits = model(ids, position_ids=places, document_ids=documents).logits
        else:
            logits = alone(model, ids, places)
        F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, expected in zip(*gradients, strict=True):
        assert ours.abs().max() > 0
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_a_cache_of_keys_gives_the_same_logits_and_ids_are_contiguous_without_any(encoding):
    model, ids = tiny.model(**tiny.ENCODINGS[encoding]), packed()
    documents = documents_of(ids)
    whole = model(ids, position_ids=window_ids("window", documents), document_ids=documents).logits
    start = model(ids[:, :7], document_ids=documents[:, :7], use_cache=True)
    rest = model(ids[:, 7:], document_ids=documents, past_key_values=start.attn_key_values).logits
    torch.testing.assert_close(rest, whole[:, 7:], atol=2e-5, rtol=1e-4)


def test_on_every_batch_has_them(tmp_path):
    off = next(TrainingData(tiny.train_config(tmp_path)).batches(0))
    assert off.document_ids is None and set(off.model_inputs) == {"input_ids", "position_ids"}
    batch = next(TrainingData(tiny.train_config(tmp_path, "--positions.doc_mask=true")).batches(0))
    assert torch.equal(batch.document_ids, documents_of(batch.input_ids))
    assert torch.equal(batch.position_ids, off.position_ids)  # PoSE's, unchanged
    assert set(batch.model_inputs) == {"input_ids", "position_ids", "document_ids"}
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.split(3)[1].document_ids, batch.document_ids[3:])


def test_restarting(tmp_path):
    # The mask may be asked for by OLMo's own flag.
    changes = {"scheme": "contiguous", "restart_at_documents": True}
    config = tiny.train_config(tmp_path, "--data.generate_doc_lengths", positions=changes)
    assert config.masks_documents
    batch = next(TrainingData(config).batches(0))
    starts = torch.zeros_like(batch.input_ids, dtype=torch.bool)
    starts[:, 0] = True
    starts[:, 1:] = batch.input_ids[:, :-1] == tiny.EOS
    assert starts[:, 1:].any()
    assert torch.equal(batch.position_ids == 0, starts)
    assert ((batch.position_ids[:, 1:] - batch.position_ids[:, :-1]) == 1)[~starts[:, 1:]].all()
