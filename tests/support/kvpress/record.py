"""Scores and kept keys of kvpress on a tiny random llama, as tests hold the policies to them: record.py OUT.npz.

It runs in an environment of its own, since kvpress wants an older transformers than this project:

    python -m venv kvpress-env
    kvpress-env/bin/pip install torch==2.13.0 kvpress==0.5.5
    kvpress-env/bin/python tests/support/kvpress/record.py tests/support/kvpress/reference.npz

Shapes: T tokens, G heads of keys in all layers, layer after layer.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import torch
from kvpress import (
    AdaKVPress,
    CriticalKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVzipPress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.presses import kvzip_press
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

VOCABULARY = 50
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LONG, FAR = 96, 64
"""Tokens that a policy sees which sees far and near ones, and those of the far context alone."""
RATIOS = (0.5, 0.75)
"""Shares that are dropped, of which the kept keys are recorded."""


def encode(text: str, **_: object) -> torch.Tensor:
    """Token ids in the place of a tokenizer's, (1, T)."""
    return torch.tensor([[1 + byte % (VOCABULARY - 1) for byte in text.encode()]])


def new_model(attention: str, weights: dict[str, np.ndarray]) -> LlamaForCausalLM:
    """The model with these weights."""
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation=attention))
    model.load_state_dict({name: torch.tensor(values).float() for name, values in weights.items()})
    return model.eval()


def new_weights() -> dict[str, np.ndarray]:
    """Random weights in fp16, of which fp32 is made: half the size on disk."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    return {name: weight.half().numpy() for name, weight in model.state_dict().items()}


def scores_and_kept(press, model, tokens: torch.Tensor) -> tuple[np.ndarray | None, np.ndarray]:
    """(G, T) scores, where the press has score(), and which keys are left, (G, T) bool."""
    recorded = []
    kept = []
    scorer = getattr(press, "press", press)
    if isinstance(press, CriticalKVPress):
        scorer = press
    of_press = getattr(scorer, "score", None)
    if of_press is not None:

        def score(*arguments, **options):
            scores = of_press(*arguments, **options)
            recorded.append(scores[0].clone())
            return scores

        scorer.score = score
    plain = DynamicCache()
    cache = DynamicCache()
    with torch.inference_mode():
        model(tokens, past_key_values=plain)
        with press(model):
            model(
                tokens, past_key_values=cache, output_attentions=model.config._attn_implementation == "eager"
            )
            every_key = [layer.keys for layer in cache.layers]
            if isinstance(press, KVzipPress):
                compress_post = press.compress_post

                def score_all(model):
                    compress_post(model)
                    recorded.extend(press.score_val[:, 0].clone())

                press.compress_post = score_all
    for layer, left in zip(model.model.layers, every_key, strict=True):
        number = layer.self_attn.layer_idx
        whole = plain.layers[number].keys[0]
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        if isinstance(press, AdaKVPress | KVzipPress):
            of_layer = np.ones(whole.shape[:2], dtype=bool)
            _, heads, columns = masked
            of_layer[heads.numpy(), columns.numpy()] = False
        else:
            distance = torch.cdist(whole.double(), left[0].double())
            of_layer = (distance.amin(dim=-1) < 1e-4).numpy()
            assert (of_layer.sum(axis=1) == left.shape[2]).all()
        kept.append(of_layer)
    scores = torch.cat(recorded).numpy() if recorded else None
    return scores, np.concatenate(kept)


def presses(window: int):
    """Name, press and attention of what is recorded."""
    return {
        "snapkv": (lambda ratio: SnapKVPress(ratio, window_size=window), "sdpa"),
        "h2o": (ObservedAttentionPress, "eager"),
        "tova": (TOVAPress, "sdpa"),
        "knorm": (KnormPress, "sdpa"),
        "keydiff": (KeyDiffPress, "sdpa"),
        "expected-attention": (ExpectedAttentionPress, "sdpa"),
        "expected-attention-plain": (
            lambda ratio: ExpectedAttentionPress(
                ratio, n_future_positions=8, n_sink=2, use_covariance=False, use_vnorm=False
            ),
            "sdpa",
        ),
        "streaming-llm": (StreamingLLMPress, "sdpa"),
        "ada-snapkv": (lambda ratio: AdaKVPress(SnapKVPress(ratio, window_size=window)), "sdpa"),
        "kvzip": (KVzipPress, "sdpa"),
        "kvzip-layerwise": (lambda ratio: KVzipPress(ratio, layerwise=True), "sdpa"),
        "kvzip-chunks": (lambda ratio: KVzipPress(ratio, chunk_size=24), "sdpa"),
        "pyramidkv": (lambda ratio: PyramidKVPress(ratio, window_size=4, beta=2), "sdpa"),
        "criticalkv": (lambda ratio: CriticalKVPress(SnapKVPress(ratio, window_size=window)), "sdpa"),
    }


def main() -> None:
    """Record all presses with the far context alone (blind) and with the near tokens (aware)."""
    kvzip_press.AutoTokenizer = SimpleNamespace(
        from_pretrained=lambda _: SimpleNamespace(chat_template=None, encode=encode)
    )
    weights = new_weights()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (1, LONG), generator=generator)
    tokens[0, 40:52] = tokens[0, 10:22]  # a repeat, which heads attend to
    out = {f"weights/{name}": values for name, values in weights.items()}
    out["tokens"] = tokens[0].numpy()
    out["config"] = np.array(json.dumps(CONFIG))
    for sees, length, window in (("blind", FAR, 16), ("aware", LONG, LONG - FAR)):
        for name, (press, attention) in presses(window).items():
            for ratio in RATIOS:
                model = new_model(attention, weights)
                scores, kept = scores_and_kept(press(ratio), model, tokens[:, :length])
                out[f"{sees}/{name}/{ratio}/kept"] = np.packbits(kept, axis=1)
                if name == "criticalkv":
                    out[f"{sees}/{name}/{ratio}/scores"] = scores
                elif scores is not None:
                    out[f"{sees}/{name}/scores"] = scores
    np.savez_compressed(sys.argv[1], **out)


if __name__ == "__main__":
    main()
