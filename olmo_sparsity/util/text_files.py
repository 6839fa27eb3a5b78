"""Files of text, as people have them, and the groups that their texts are parts of."""

from __future__ import annotations

import re
from urllib.parse import urlsplit


def group_of_url(url: str) -> str:
    """The work or site that a document with this ``url`` is a part of, in C4's layout.

    Web crawls have no fragments (``#…``), so one was put there to tell the parts of a work from each other: a number
    at its end counts slices of one work, and any other fragment is a part of what stands before it. Without a
    fragment it is the site: the host, without "www.". What is no web address is a name already.
    """
    if not re.match("https?://", url, re.IGNORECASE):
        return url
    whole, _, fragment = url.partition("#")
    if fragment:
        name = re.sub(r"-\d+$", "", fragment)
        return whole if name == fragment else f"{whole}#{name}"
    try:
        return (urlsplit(url).hostname or url).removeprefix("www.")
    except ValueError:  # a bracket without its partner
        return url
