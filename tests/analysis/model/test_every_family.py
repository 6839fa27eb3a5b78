"""Every causal language model of transformers that a tiny configuration builds: measured right, or refused by name."""

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from analysis.model.load import adapter_of
from analysis.model.scorer import Scorer
from analysis.model.trial import check_long_context
from olmo_sparsity.util.errors import UserError
from tests.support.families import tiny_causal_lm
from tests.support.measured import plain_loss, random_contexts

N, M = 24, 6
FAR = N - M


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_losses_are_those_of_plain_passes_and_a_full_bias_drops_a_token(name):
    model = tiny_causal_lm(name)
    if model is None:
        pytest.skip("not built by a tiny configuration")
    try:
        adapter = adapter_of(model, f"the model ({name})")
        check_long_context(adapter, N, name=f"the model ({name})", option="n_long")
    except UserError as error:
        assert name in str(error) and "\n" not in str(error)
        return
    contexts, scorer = random_contexts(N, M, 2), Scorer(adapter, tokens_per_batch=400)
    columns = np.arange(FAR - 1)
    without = columns + (columns >= np.arange(FAR)[:, None])
    rows = zip(contexts.tokens, contexts.targets[:, 0], strict=True)
    subsets = [[*kept, *range(FAR, N)] for kept in without]
    plain = np.array([[plain_loss(model, text, kept, target) for kept in subsets] for text, target in rows])
    np.testing.assert_allclose(scorer.losses(contexts, without), plain, atol=1e-5, rtol=0)
    attention = scorer.last_attention(contexts, contexts.all_targets)
    assert (attention >= 0).all() and (attention.sum(axis=1) <= 1 + 1e-5).all() and attention.max() > 0
    assert np.isfinite(scorer.input_gradients(contexts, contexts.all_targets)).all()
    try:
        assert np.isfinite(scorer.presence_gradient(contexts, contexts.all_targets)).all()
    except UserError as error:
        assert name in str(error)
        return
    tokens, ids = torch.from_numpy(contexts.tokens), torch.arange(N).expand(2, -1)
    for column in (0, 7):
        bias = torch.zeros(2, N, N)
        bias[:, :, column], bias[:, column, column] = -70.0, 0.0
        logits = adapter.biased_logits(tokens, ids, bias, 1)[:, 0].double()
        dropped = -logits.log_softmax(-1)[range(2), contexts.targets[:, 0]].numpy()
        np.testing.assert_allclose(dropped, plain[:, column], atol=1e-5, rtol=0)
