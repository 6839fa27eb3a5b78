"""Mesa-Extrapolation (`results/encodings/mesa.py`) against attention by explicit relative positions, pair by pair."""

import runpy
from pathlib import Path

import torch
import torch.nn.functional as F

from analysis.open_model import open_model
from tests.support import tiny
from tests.support.tiny import checkpoint

STUDY = runpy.run_path(str(Path(__file__).parents[1] / "results" / "encodings" / "mesa.py"))
REACH = 64  # the ids of the training config stay below
LENGTH, FACTOR = 190, 3
TOKENS = torch.randint(0, 50, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def rotated_scores(q, k, relative, theta):
    """(H, Q, K) scores of queries (H, Q, D) and keys (H, K, D) that stand ``relative`` (Q, K) apart."""
    half = q.shape[-1] // 2
    angles = relative[..., None] * theta ** -(torch.arange(half) / half)
    q, k = (torch.complex(values[..., :half], values[..., half:]) for values in (q, k))
    turned = torch.einsum("hqd,hkd,qkd->hqk", q, k.conj(), torch.polar(torch.ones_like(angles), angles))
    return turned.real / (2 * half) ** 0.5


def attend(block, queries, keys, relative, sees, factor):
    """The block's output for hidden states ``queries`` (Q, W) that read those of ``keys`` (K, W)."""
    config = block.config

    def parts(hidden):
        q, k, v = block.att_proj(block.attn_norm(hidden)).split([config.d_model] * 3, dim=-1)
        return [values.unflatten(-1, (config.n_heads, -1)).transpose(0, 1) for values in (q, k, v)]

    q, k, v = parts(queries)[0], *parts(keys)[1:]
    scores = rotated_scores(q, k, relative, config.rope_theta) * factor[:, None]
    mixed = scores.masked_fill(~sees, -torch.inf).softmax(dim=-1) @ v
    hidden = queries + block.attn_out(mixed.transpose(0, 1).flatten(1))
    return hidden + block.ff_out(block.act(block.ff_proj(block.ff_norm(hidden))))


@torch.inference_mode()
def expected_logits(model, mesa):
    """Two streams of hidden states: alone in their chunks, and woven, reading the former of all chunks before."""
    embedded = model.transformer["wte"](TOKENS[0])
    place = torch.arange(LENGTH)
    chunk = torch.where(place < mesa.first_chunk, 0, (place - mesa.first_chunk) // mesa.other_chunks + 1)
    begin = torch.where(chunk == 0, 0, mesa.first_chunk + (chunk - 1) * mesa.other_chunks)
    behind = place[:, None] - place
    same = chunk[:, None] == chunk
    causal = behind >= 0
    alone_sees = causal & (same | (chunk == 0))
    alone_relative = torch.where(same, behind, place[:, None] - begin[:, None] + mesa.first_chunk - place)
    stair = place[:, None] - begin[:, None] + 1 + (begin[:, None] - 1 - place) // mesa.repeated
    relative = torch.where(same, behind, stair)
    one = torch.ones(LENGTH)
    sharper = ((place + 1).log() / torch.tensor(float(mesa.trained)).log()).clamp_min(1)
    alone = woven = usual = embedded
    for block in model.transformer["blocks"]:
        read = torch.cat([alone, woven])
        sees = torch.cat([causal & ~same, causal & same], dim=1)
        woven = attend(block, woven, read, relative.repeat(1, 2).float(), sees, sharper)
        alone = attend(block, alone, alone, alone_relative.float(), alone_sees, one)
        usual = attend(block, usual, usual, behind.float(), causal, one)
    hidden = torch.where((place < mesa.trained)[:, None], usual, woven)
    return F.linear(model.transformer["ln_f"](hidden), model.head().weight)


def test_logits_are_those_of_attention_pair_by_pair(tmp_path):
    source, _ = checkpoint(tmp_path, d_model=32, n_heads=2)
    loaded, ids = STUDY["read_by_mesa"](source, FACTOR), torch.arange(LENGTH)[None]
    mesa = loaded.model
    assert (mesa.trained, mesa.first_chunk, mesa.other_chunks, mesa.repeated) == (REACH, 4, 32, 6)
    assert (loaded.name, loaded.rope_scaling, loaded.reads) == (f"{source}@mesa:3", "mesa:3", 3 * REACH)
    expected = expected_logits(mesa.model, mesa)
    tolerance = 1e-5 * float(expected.abs().max())
    with torch.inference_mode():
        for kept in (LENGTH, 150, 70, 5):
            woven = open_model(loaded).model(TOKENS, position_ids=ids, logits_to_keep=kept).logits[0]
            torch.testing.assert_close(woven, expected[-kept:], rtol=0, atol=tolerance)
        plain = open_model(source).model(TOKENS, position_ids=ids).logits[0]
    difference = (plain - expected).abs().amax(dim=-1)
    assert difference[:REACH].max() < tolerance < 1e-2 * difference[REACH:].max()


def test_no_distance_exceeds_what_was_trained():
    for trained in (16, 64, 100):
        for factor in (1, 2, 3.5, 16):
            mesa = STUDY["MesaAdapter"](tiny.model(), factor, trained)
            for begin, end in mesa.spans(int(trained * factor)):
                ids = mesa.woven_ids(begin, end)
                assert len(ids) == end and (ids.diff() >= 0).all() and int(ids[-1] - ids[0]) < trained
                assert begin == 0 or end - begin + mesa.first_chunk <= trained
