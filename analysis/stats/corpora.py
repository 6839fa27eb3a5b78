"""One measurement in several corpora side by side: is the sparse dependency a matter of the text? [ours]

Joins influence records of one model per corpus, of several trainings each, with its loss by position (`length.json`).
Tokenizers cut texts into pieces of different length, so what is per token is told per byte too: nats per token divided
by, and distances multiplied by, the UTF-8 bytes per token of the text that was measured. Neither a model nor torch is
needed. Losses are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analysis.records.store import Records
from analysis.stats.bootstrap import divided
from analysis.stats.ladder import by_weights, sparsity_at, weights_of
from analysis.stats.summary import summarize
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

KINDS = {
    "repeat": "repeat",
    "name": "name",
    "number": "number",
    "punctuation": "punctuation",
    "content word": "other",
}
"""Kinds of target that mean the same in every text, and their names: function words are known of English only."""


def corpus_numbers(
    label: str, records: Records, lengths: Sequence[Json], *, selector: str, k: int, resamples: int, seed: int
) -> Json:
    """What is shown of one corpus: use of the far context, recovery, tokens needed, kinds, distances and loss.

    Args:
        label: of the corpus.
        records: of its trainings, joined.
        lengths: results of loss by position, one of which has these trainings and no others.
        selector: the one whose choices are shown.
        k: of kinds, distances and recoveries.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises `UserError` for a selector or k that was not measured, or trainings that were not measured by position.
    """
    kinds = np.where(records.targets.kind == "function word", "content word", records.targets.kind)
    records = replace(records, targets=replace(records.targets, kind=kinds))
    summary = summarize(records, resamples, seed, k_of_bins=k)
    sparsity = sparsity_at(summary, selector, k)
    model, bytes_per_token = _loss_by_position(records, lengths)
    gain = summary["all_targets"]["gap_short_minus_long"]
    return {
        "label": label,
        "trainings": len(records.trainings) or 1,
        "bytes_per_token": bytes_per_token,
        **{name: summary[name] for name in ("targets", "targets_over_tau", "share_over_tau")},
        **{name: summary["settings"][name] for name in ("documents_over_tau", "groups_over_tau")
           if name in summary["settings"]},
        "share_over_tau_of_trainings": [each["share_over_tau"] for each in summary.get("trainings", [])],
        "gain_nats_per_token": gain,
        "gain_nats_per_byte": divided(gain, bytes_per_token),
        **sparsity,
        "recoveries": summary["selectors"][selector],
        "tokens_needed": {
            "share": summary["tokens_needed"]["share"],
            "ks": summary["tokens_needed"]["ks"],
            **summary["tokens_needed"]["selectors"][selector],
        },
        "kinds": _kinds(summary, selector),
        "distances": {"edges": summary["distances"]["edges"], **summary["distances"]["selectors"][selector]},
        "loss_by_position": [
            {**each, "loss_nats_per_byte": divided(each["loss_nats"], bytes_per_token)} for each in model["bins"]
        ],
        "loss_at_lengths": [
            {
                "length": each["length"],
                "loss_nats": each["loss_nats"],
                "loss_nats_per_byte": divided(each["loss_nats"], bytes_per_token),
            }
            for each in model["at_lengths"]
        ],
    }  # fmt: skip


def _loss_by_position(records: Records, lengths: Sequence[Json]) -> tuple[Json, float]:
    """The model of ``lengths`` whose checkpoints are those of ``records``, and its text's bytes per token."""
    wanted = set(weights_of(records))
    for length_json in lengths:
        for model in length_json["models"]:
            if by_weights(model).keys() == wanted:
                if "bytes_per_token" not in length_json["settings"]:
                    raise UserError(
                        f"the loss by position of {records.manifest.checkpoint} does not tell bytes per token; "
                        "measure it again with scripts/length.py"
                    )
                return model, length_json["settings"]["bytes_per_token"]
    raise UserError(
        f"the trainings of {records.folder} were not measured by position together; give their --length, "
        "measured with scripts/length.py under one label"
    )


def _kinds(summary: Json, selector: str) -> list[Json]:
    return [
        {
            "kind": KINDS[each["kind"]],
            "targets_over_tau": each["targets_over_tau"],
            "share": each["share"],
            "share_over_tau": each["share_over_tau"],
            "net_recovery": each["selectors"][selector]["net_recovery"],
        }
        for each in summary["kinds"]["kinds"]
    ]
