"""The numbers of this page, from the result and the loss by position of six kinds of text.

    python results/languages/study.py [RESAMPLES, default 10000]

Both trainings of each together; 95 % intervals by training, work and document. What is per token is told per byte too,
by the UTF-8 bytes per token of the text that was measured.
"""

import sys
from pathlib import Path

import pandas as pd

from analysis import Result, load_study
from analysis.probes.length import LossByPosition
from analysis.stats import numbers

HERE = Path(__file__).parent
CORPORA = ("english", "french", "german", "spanish", "russian", "python")
SELECTOR, K = "leave-one-out-kl", 4


def text_of(row, scale=100.0, digits=0):
    value, low, high = (scale * row[name] for name in ("value", "low", "high"))
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def one(frame, **wanted):
    """The row of a frame in which the columns have these values."""
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    [row] = frame.to_dict("records")
    return row


def main(resamples):
    study, far, near, of_kinds = load_study(HERE), [], [], []
    for corpus in CORPORA:
        result = Result.join([study[f"{corpus}/seed-{seed}"] for seed in (1, 2)])
        # function words are known of English only
        result.targets["kind"] = result.targets["kind"].replace("function word", "content word")
        options = {"resamples": resamples}
        length = LossByPosition.load(HERE / corpus / "length")
        bytes_per_token = length.settings["bytes_per_token"]
        shares = numbers.shares(result, **options)
        recovery = numbers.recovery(result, **options)
        needed = numbers.tokens_needed(result, **options)
        of_default = {"selector": SELECTOR, "k": K}
        far.append(
            {
                "": corpus,
                "bytes / token": round(bytes_per_token, 2),
                "targets over tau": f"{len(result.over):,} of {len(result.targets):,}",
                "share [%]": text_of(one(shares, name="share_over_tau"), digits=1),
                **{
                    f"{name} [%]": text_of(one(recovery, far_context=name, **of_default))
                    for name in ("true", "placebo", "net")
                },
                "net at k = 1 [%]": text_of(one(recovery, selector=SELECTOR, far_context="net", k=1)),
                "4 tokens give 90 % [% of them]": text_of(
                    one(needed, name="reached", far_context="true", **of_default)
                ),
            }
        )
        gain = one(shares, name="gain_nats")
        losses = length.with_training(length.numbers)
        near.append(
            {
                "": corpus,
                "gain [nats / token]": text_of(gain, 1, 3),
                "gain [nats / byte]": text_of(gain, 1 / bytes_per_token, 4),
                "loss at 256 [nats / token]": text_of(
                    one(losses, name="loss_at_length_nats", to_tokens=256), 1, 2
                ),
                **{
                    f"loss at {tokens:,} [nats / byte]": text_of(
                        one(losses, name="loss_at_length_nats", to_tokens=tokens), 1 / bytes_per_token, 3
                    )
                    for tokens in (256, 512, 1024)
                },
            }
        )
        frame = numbers.kinds(result, k=K, **options)
        frame = frame[frame["name"].isin(["share", "share_over_tau"])]
        of_kinds.append(frame.assign(corpus=corpus, text=[text_of(row) for row in frame.to_dict("records")]))
    for rows in (far, near):
        print(pd.DataFrame(rows).to_string(index=False), end="\n\n")
    kinds = pd.concat(of_kinds)
    print(
        kinds.pivot_table(
            index=["name", "kind"], columns="corpus", values="text", aggfunc="first"
        ).to_string()
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
