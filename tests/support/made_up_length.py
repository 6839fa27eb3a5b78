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
    labels = dict.fromkeys(one["label"] for one in checkpoints)
    models = [
        {
            "label": label,
            "checkpoints": [one for one in checkpoints if one["label"] == label],
            "bins": [{"from": 64, "to": 128, "loss_nats": interval(3.0)}],
            "at_lengths": checkpoints[0]["at_lengths"],
        }
        for label in labels
    ]
    measured = {"lengths": [128, 256, 512], "windows_measured": 20, "documents": 9, **settings}
    return LENGTH.stamped({"settings": measured, "models": models})
