"""More of a measurement that is there: its choices kept as words, as neighbors, without sinks; and another placebo.

    python results/models/units.py units MODEL TEXTS.jsonl RUN OUT     L_k of k words, and of k tokens with neighbors
    python results/models/units.py sinks MODEL TEXTS.jsonl RUN OUT     what RUN has, and L_k as cache without sinks
    python results/models/units.py same-group MODEL TEXTS.jsonl RUN OUT  every third part, elsewhere in its text

RUN is the folder of a measurement by `olmo-sparsity measure`, with parts/*, and OUT gets the same parts: the
same targets, whose losses are compared. A unit takes the place of its first token in the recorded ranking. `study.py
collect` adds them to the study. The same command goes on after an interruption.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import Result, load
from analysis.contexts import placebo_contexts
from analysis.engine import Engine
from analysis.measurement import RESULT_NAME
from analysis.model.losses import Scorer
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.parquet import stacked
from analysis.sampling import sample_targets
from analysis.selectors import Selection
from olmo_sparsity.util.provenance import provenance

SELECTORS = ("leave-one-out-kl", "attention")
UNITS, KS = {"units": ["text/word", "text/neighbors", "cache:4/word"], "sinks": ["cache"]}, [1, 4]
EXACT = SELECTORS[:1]


def recorded(rows: pd.DataFrame, count: int) -> Selection:
    """The first tokens of recorded choices, as a selector gives them."""
    columns = np.stack(rows["selected"])[:, :count].astype(np.int64)
    return Selection(columns, np.zeros(columns.shape))


def as_units(engine: Engine, part: Result) -> pd.DataFrame:
    """Rows of choices: what was chosen as tokens, kept as other units, and L_k of these."""
    over, rows = part.targets[part.targets["over_tau"]], []
    of_tokens = part.choices[(part.choices["level"] == "text") & (part.choices["unit"] == "token")]
    for _, targets in over.groupby(over["target_id"] // engine.size):
        contexts, index = engine._contexts(targets)
        block = targets.iloc[:1]
        placebo = placebo_contexts(
            engine.texts, contexts, block["placebo_text"].to_numpy(), block["placebo_start"].to_numpy()
        )
        for far_context, read in {"true": contexts, "placebo": placebo}.items():
            words = engine._words(read)[index[:, 0]]
            for name in SELECTORS:
                which = (of_tokens["selector"] == name) & (of_tokens["far_context"] == far_context)
                choice = recorded(
                    of_tokens[which].set_index("target_id").loc[targets["target_id"]], part.k_max
                )
                keys = {"target_id": targets["target_id"], "selector": name, "far_context": far_context}
                for way in engine.keep_as:
                    columns = engine._kept_columns(way, choice, read, index, words)
                    listed = {column: list(values) for column, values in columns.items()}
                    rows.append(pd.DataFrame(keys | way.columns | listed))
    return stacked(rows)


def main(what: str, model: str, texts: str, run: str, out: str) -> None:
    """Measure, batch by batch."""
    made, loaded = provenance(), open_model(model)
    made["created"] = made.pop("started")
    source = open_texts([Path(texts)], loaded.reader)
    parts = sorted(path.parent for path in Path(run).glob(f"parts/*/{RESULT_NAME}"))
    before = load(parts[0]).settings
    assert (before.texts.sha256, before.model.sha256) == (source.sha256, loaded.sha256), "another run"
    drawing = before.contexts.drawn_by
    places = sample_targets(source, before.targets_requested, same_group=True, **drawing)
    changes: dict[str, dict[str, Any]] = {
        "units": {"selectors": list(SELECTORS), "keep_as": UNITS["units"], "ks": KS},
        "sinks": {"keep_as": UNITS["sinks"]},
        "same-group": {"selectors": list(EXACT), "far_contexts": ["same-group"]},
    }
    settings = before.but(**changes[what])
    scorer = Scorer(loaded.model)
    engine = Engine(settings, source, loaded.decoder, scorer, selecting=scorer)
    for folder in parts[::3] if what == "same-group" else parts:
        to, began = Path(out) / "parts" / folder.name, time.monotonic()
        if (to / RESULT_NAME).is_file():
            continue
        part = load(folder)
        if what == "units":
            part = replace(part, choices=as_units(engine, part), settings=settings)
        elif what == "sinks":
            both = stacked([part.choices, as_units(engine, part)])
            keep_as = [*before.choices.keep_as, *UNITS[what]]
            part = replace(part, choices=both, settings=before.but(keep_as=keep_as))
        else:
            of_part = places[places["target_id"].isin(part.targets["target_id"])]
            targets = engine.with_losses(of_part)
            apart = np.abs(targets["loss_long_nats"].to_numpy() - part.targets["loss_long_nats"])
            assert apart.max() < 1e-4, f"other losses than recorded: {apart.max()} nats"
            rounds = [engine.choose(of_round)["choices"] for of_round in engine.rounds(targets)]
            both = [part.choices[part.choices["selector"].isin(EXACT)], *rounds]
            changed = settings.but(far_contexts=[*before.choices.far_contexts, "same-group"])
            part = replace(part, targets=targets, choices=stacked(both), settings=changed, texts=None)
        seconds = time.monotonic() - began
        about = made | {"seconds": seconds}
        if what == "sinks":  # with what RUN has
            about["seconds"] += part.provenance["seconds"]
            about["commit"] = f"{part.provenance['commit']} {made['commit']}"
        replace(part, texts=None, provenance=about).save(to)
        print(f"{folder.name}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
