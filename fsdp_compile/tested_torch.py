"""The versions of torch that the tests have run on; docs/upgrading_torch.md says how many of them."""

import re

TESTED_TORCH = ("2.11", "2.13", "2.14")
"""The newest is the last."""


def is_untested(version: str) -> bool:
    """Whether torch's `version` is newer than all that the package was tested on."""
    running, newest = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (version, TESTED_TORCH[-1]))
    return running > newest
