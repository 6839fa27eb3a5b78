"""Loss by position as `length.json` has it, with losses made up."""

from analysis.records.results import LENGTH

SHAS = {name: name * 64 for name in "abcd"}


def interval(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.2}


def checkpoint(sha, label, rise, parameters, **changes):
    at_lengths = [
        {"length": length, "loss_nats": interval(3.0), "rise_nats": interval(up)}
        for length, up in ((128, 0.0), (256, rise / 2), (512, rise))
    ]
    made = {
        "label": label, "checkpoint": f"runs/{sha}", "checkpoint_sha256": SHAS[sha], "training_seed": ord(sha),
        "parameters": parameters, "rope_scaling": None, "training_length": 128, "at_lengths": at_lengths,
        "position_target": None, "position_scheme": "contiguous",
    }  # fmt: skip
    return {**made, **changes}


def length_json(*checkpoints, **settings):
    by_label: dict = {}
    for one in checkpoints:
        by_label.setdefault(one["label"], []).append(one)
    models = [
        {
            "label": label,
            "checkpoints": own,
            "bins": [{"from": 64, "to": 128, "loss_nats": interval(3.0)}],
            "at_lengths": [
                {**at[0], "rise_nats": interval(sum(each["rise_nats"]["value"] for each in at) / len(own))}
                for at in zip(*(one["at_lengths"] for one in own), strict=True)
            ],
        }
        for label, own in by_label.items()
    ]
    measured = {"lengths": [128, 256, 512], "windows_measured": 20, "documents": 9, **settings}
    return LENGTH.stamped({"settings": measured, "models": models})


def made_up_length():
    """RoPE and RoPE + PoSE up to 512 tokens, in bins of which each has its own loss."""
    pose = {"position_target": 512, "position_scheme": "pose"}
    found = length_json(checkpoint("a", "RoPE", 0.0, 1000), checkpoint("b", "RoPE + PoSE", 0.0, 1000, **pose))
    for model, losses in zip(found["models"], ((3.0, 2.9, 4.0), (3.1, 3.0, 2.8)), strict=True):
        model["bins"] = [
            {"from": low, "to": high, "loss_nats": interval(loss)}
            for low, high, loss in zip((64, 128, 256), (128, 256, 513), losses, strict=True)
        ]
    return LENGTH.stamped({name: found[name] for name in ("settings", "models")})
