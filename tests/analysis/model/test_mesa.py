"""Mesa-Extrapolation against attention by explicit relative positions, pair by pair, and what refuses it."""

import pytest
import torch
import torch.nn.functional as F

from analysis.model.mesa import Chunks
from analysis.model.rope_scaling import load_scaled
from olmo_sparsity.model.rope_scaling import RopeScaling
from tests.support.refusals import refused
from tests.support.tiny import checkpoint

TRAINED, LENGTH, FACTOR = 64, 190, 3
TOKENS = torch.randint(0, 50, (1, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("mesa"), d_model=32, n_heads=2)[0]


def rotated_scores(q, k, relative, theta):
    """(H, Q, K) scores of queries (H, Q, D) and keys (H, K, D) that stand ``relative`` (Q, K) apart."""
    half = q.shape[-1] // 2
    angles = relative[..., None] * theta ** -(torch.arange(half) / half)
    q, k = (torch.complex(each[..., :half], each[..., half:]) for each in (q, k))
    turned = torch.einsum("hqd,hkd,qkd->hqk", q, k.conj(), torch.polar(torch.ones_like(angles), angles))
    return turned.real / (2 * half) ** 0.5


def attend(block, queries, keys, relative, sees, factor):
    """The block's output for hidden states ``queries`` (Q, W) that read those of ``keys`` (K, W)."""
    config = block.config
    width = config.d_model

    def parts(hidden):
        q, k, v = block.att_proj(block.attn_norm(hidden)).split([width] * 3, dim=-1)
        return [each.unflatten(-1, (config.n_heads, -1)).transpose(0, 1) for each in (q, k, v)]

    q, k, v = parts(queries)[0], *parts(keys)[1:]
    scores = rotated_scores(q, k, relative, config.rope_theta) * factor[:, None]
    mixed = scores.masked_fill(~sees, -torch.inf).softmax(dim=-1) @ v
    hidden = queries + block.attn_out(mixed.transpose(0, 1).flatten(1))
    return hidden + block.ff_out(block.act(block.ff_proj(block.ff_norm(hidden))))


@torch.inference_mode()
def expected_logits(model, chunks):
    """Two streams of hidden states: alone in their chunks, and asked, reading the former of all chunks before."""
    embedded = model.transformer["wte"](TOKENS[0])
    place = torch.arange(LENGTH)
    chunk = torch.where(place < chunks.first, 0, (place - chunks.first) // chunks.others + 1)
    begin = torch.where(chunk == 0, 0, chunks.first + (chunk - 1) * chunks.others)
    behind = place[:, None] - place
    own = chunk[:, None] == chunk
    causal = behind >= 0
    alone_sees = causal & (own | (chunk == 0))
    alone_relative = torch.where(own, behind, place[:, None] - begin[:, None] + chunks.first - place)
    stair = place[:, None] - begin[:, None] + 1 + (begin[:, None] - 1 - place) // chunks.repeated
    relative = torch.where(own, behind, stair)
    one = torch.ones(LENGTH)
    sharper = ((place + 1).log() / torch.tensor(float(chunks.trained)).log()).clamp_min(1)
    alone = asked = usual = embedded
    for block in model.transformer["blocks"]:
        read = torch.cat([alone, asked])
        asked = attend(
            block, asked, read, relative.repeat(1, 2).float(),
            torch.cat([causal & ~own, causal & own], dim=1), sharper,
        )  # fmt: skip
        alone = attend(block, alone, alone, alone_relative.float(), alone_sees, one)
        usual = attend(block, usual, usual, behind.float(), causal, one)
    hidden = torch.where((place < chunks.trained)[:, None], usual, asked)
    return F.linear(model.transformer["ln_f"](hidden), model.head().weight)


def test_logits_are_those_of_attention_pair_by_pair(source):
    loaded = load_scaled(f"{source}@mesa:{FACTOR}")
    chunks = loaded.model.chunks
    assert chunks == Chunks(trained=TRAINED, first=4, others=32, repeated=6)
    expected = expected_logits(loaded.model.model, chunks)
    with torch.inference_mode():
        for asked in (LENGTH, 150, 70, 5):
            found = loaded.model(
                TOKENS, position_ids=torch.arange(LENGTH)[None], logits_to_keep=asked
            ).logits[0]
            torch.testing.assert_close(
                found, expected[-asked:], rtol=0, atol=1e-5 * float(expected.abs().max())
            )
        plain = load_scaled(str(source)).model(TOKENS, position_ids=torch.arange(LENGTH)[None]).logits[0]
    difference = (plain - expected).abs().amax(dim=-1)
    assert difference[:TRAINED].max() < 1e-5 * expected.abs().max() < 1e-2 * difference[TRAINED:].max()


def test_no_distance_exceeds_what_was_trained():
    for trained in (16, 64, 100):
        for factor in (1, 2, 3.5, 16):
            chunks = Chunks.reaching(RopeScaling("mesa", factor, trained))
            for begin, end in chunks.spans(int(trained * factor)):
                ids = chunks.woven_ids(begin, end)
                assert len(ids) == end and (ids.diff() >= 0).all() and int(ids[-1] - ids[0]) < trained
                assert begin == 0 or end - begin + chunks.first <= trained


def test_chunks_drop_no_token(source):
    with refused("no token can be dropped from a context that is read in chunks"):
        load_scaled(f"{source}@mesa:2").check_context(128)
