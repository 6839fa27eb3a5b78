"""Cut six kinds of text alike: 8.8 MB to train on, and ten held-out works (Python: packages), a folder for each kind.

    python split.py SOURCE OUT

SOURCE has JSON lines of documents (`text`, `url`) in files of these names. A work is what its slices' urls name: a
book, a package, or a module or package of Python's standard library. The ten smallest works above 80 kB are held out.
"""

import gzip
import json
import random
import re
import sys
from pathlib import Path

FILES = {
    "english": "books-*",
    "french": "languages-fr-*",
    "german": "languages-de-*",
    "spanish": "languages-es-*",
    "russian": "languages-ru-*",
    "python": "code-*",
}
TRAINING_BYTES, LEAST_HELDOUT, HELDOUT_WORKS = 8.8e6, 80_000, 10
ENGLISH_WORKS, LARGEST_ENGLISH = 26, 1.3e6  # as many, and as large, as the other languages have


def work_of(kind: str, url: str) -> str:
    """The work that a document is a slice of."""
    if "/Lib/" in url:
        return re.sub(r"/Lib/([^/]+).*", r"/Lib#\1", url)
    return url.split("#")[0] if kind == "python" else re.sub(r"-\d+$", "", url)


source, out = Path(sys.argv[1]), Path(sys.argv[2])
for kind, pattern in FILES.items():
    works: dict[str, list[str]] = {}
    for path in sorted(source.glob(pattern + ".json.gz")):
        with gzip.open(path, "rt", encoding="utf8") as lines:
            for row in map(json.loads, lines):
                works.setdefault(work_of(kind, row["url"]), []).append(row["text"])
    size = {name: sum(len(text.encode()) for text in texts) for name, texts in works.items()}
    names = sorted(works)
    if kind == "english":
        names = random.Random(0).sample(
            [name for name in names if size[name] < LARGEST_ENGLISH], ENGLISH_WORKS
        )
    heldout = sorted((name for name in names if size[name] > LEAST_HELDOUT), key=size.__getitem__)[
        :HELDOUT_WORKS
    ]
    training = [(name, text) for name in names if name not in heldout for text in works[name]]
    random.Random(0).shuffle(training)
    total, cut = 0, []
    for name, text in training:
        total += len(text.encode())
        if total > TRAINING_BYTES:
            break
        cut.append((name, text))
    (out / kind).mkdir(parents=True, exist_ok=True)
    for part, rows in {"train": cut, "heldout": [(n, t) for n in heldout for t in works[n]]}.items():
        with gzip.open(out / kind / f"{part}.json.gz", "wt", encoding="utf8") as file:
            for name, text in rows:
                print(json.dumps({"text": text, "work": name}), file=file)
    works_trained = len({name for name, _ in cut})
    print(
        f"{kind}: {works_trained} works to train on, held out {sum(size[n] for n in heldout):,} bytes of {heldout}"
    )
