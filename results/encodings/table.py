"""Print the two tables of this folder's page from its result files: a row for each model of length.json.

    python results/encodings/table.py [FOLDER]

What was not measured of a model is a dash; cost.json may be missing.
"""

import json
import re
import sys
from pathlib import Path

HERE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent


def load(name):
    path = HERE / name
    return json.loads(path.read_text()) if path.is_file() else {}


def cell(interval, scale=1.0, digits=2):
    """``value [low, high]``."""
    if not interval:
        return "–"
    zero = f"{0:.{digits}f}"
    texts = [f"{scale * interval[name]:.{digits}f}" for name in ("value", "low", "high")]
    return "{} [{}, {}]".format(*(zero if text == f"-{zero}" else text for text in texts))


def rows():
    """The cells of each model by column."""
    length, ladder, cost = map(load, ("length.json", "ladder.json", "cost.json"))
    points = {each["label"]: each for each in ladder["points"]}
    costs = {Path(name).stem: row for name, row in cost.get("results", {}).items()}
    window = length["settings"]["lengths"][0]
    for model in [*length["models"], *load("length-mesa/length.json").get("models", ())]:
        point, first = points.get(model["label"], {}), model["checkpoints"][0]
        attention = model["at_lengths"][0].get("attention")
        at = {one["length"]: one for one in model["at_lengths"]}
        config = re.search(r"config=([^,/]*)", first["checkpoint"])
        own = {} if first["rope_scaling"] or config is None else costs.get(config[1], {})
        yield {
            "": model["label"],
            **{f"{one['length']:,}": f"{one['loss_nats']['value']:.2f}" for one in model["at_lengths"]},
            f"at {4 * window} − at {window}": cell(at[4 * window]["rise_nats"]),
            "use": cell(point.get("use_nats"), digits=3),
            "change": cell(point.get("change_nats"), digits=3),
            "needles [%]": cell(point.get("needle_exact"), 100, 0),
            "gain inside": cell(point.get("gain_nats"), digits=3),
            "over tau [%]": cell(point.get("share_over_tau"), 100, 1),
            "net [%]": cell(point.get("net_recovery"), 100, 0),
            "4 suffice [%]": cell(point.get("k_suffices"), 100, 0),
            "entropy": f"{attention['entropy_nats']['value']:.2f}" if attention else "–",
            "zeros [%]": f"{100 * attention['zero_share']['value']:.0f}" if attention else "–",
            "speed": f"{own['ratio']:.2f}" if own else "–",
            "memory [MB]": f"{own['step_bytes'] / 1e6:.0f}" if own else "–",
        }


table = list(rows())
shown = [name for name in table[0] if any(row[name] != "–" for row in table)]
split = shown.index("gain inside")
for names in (shown[:split], ["", *shown[split:]]):
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in table:
        print("| " + " | ".join(row[name] for name in names) + " |")
    print()
