"""The worked example of the method page: what "compass" near the end of the story needs, as text and as cache.

    python results/models/story/compass.py SmolLM2-135M-Instruct.Q4_1.gguf

Ranks far tokens by the influences that the X-ray recorded; the placebo is the far context of another text.
"""

import sys
from pathlib import Path

import numpy as np

from analysis import InfluenceMap
from analysis.contexts import Contexts
from analysis.kept import KeptAs
from analysis.model.losses import Scorer, long_and_short_losses
from analysis.open_model import open_model
from analysis.selectors import Selection

HERE = Path(__file__).parent
PLACEBO = HERE.parents[1] / "books" / "xray" / "sherlock-holmes.txt"
TARGET, SHORT, KS = 264, 16, (1, 2, 4, 8)

story = InfluenceMap.load(HERE)
loaded = open_model(sys.argv[1])
tokens = story.tokens["token"].to_numpy()
contexts = Contexts(tokens[None, :TARGET], tokens[None, TARGET : TARGET + 1], np.zeros((1, 1), int), SHORT)
scorer = Scorer(loaded.model, device=loaded.device)
(long,), (short,) = long_and_short_losses(scorer, contexts)
other = contexts.with_far(loaded.encode(PLACEBO.read_text(encoding="utf8"))[None, : contexts.n_far])
(placebo,), _ = long_and_short_losses(scorer, other)
print(f"short {short:.2f}, long {long:.2f}, behind the far context of another text {placebo:.2f} nats")

scores = story.matrix()[TARGET][None, : contexts.n_far]
columns = np.argsort(-scores, axis=1, kind="stable")
choice = Selection(columns, np.take_along_axis(scores, columns, axis=1), scores)
pieces = story.tokens["piece"].to_numpy()
losses = {
    way: KeptAs.parse(way).losses(scorer, contexts, np.array([[0, 0]]), choice, np.zeros_like(columns), KS)[0]
    for way in ("text", "cache", "cache:4")
}
for number, k in enumerate(KS):
    chosen = [str(pieces[i]) for i in sorted(columns[0, :k])]
    print(k, chosen, {way: f"{of_way[number]:.2f}" for way, of_way in losses.items()})
