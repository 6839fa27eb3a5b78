"""Each position encoding does to a model what its object says."""

import pytest
import torch

from olmo_sparsity.positions import ENCODINGS
from tests.support import tiny


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
@torch.no_grad()
def test_a_model_reads_ids_as_its_encoding_says(encoding):
    model = tiny.model(**{each.switch: each is encoding for each in ENCODINGS if each.switch})
    assert model.config.encoding is encoding
    assert any("wpe" in name for name in model.state_dict()) == encoding.has_table
    tokens, ids = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(0)), torch.arange(12)
    assert (model._attention_bias(ids[None], None) is not None) == encoding.biases

    def logits(position_ids):
        return model(tokens, position_ids=position_ids[None]).logits

    reads_ids = encoding.rotates or encoding.biases or encoding.has_table
    assert torch.allclose(logits(2 * ids), logits(ids), atol=1e-4) == (not reads_ids)
    assert torch.allclose(logits(ids + 5), logits(ids), atol=1e-4) == (not encoding.has_table)
