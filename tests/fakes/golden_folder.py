"""Where the golden arrays are: the folder in the environment variable VLARL_GOLDEN, by default tests/golden.

Any arrays of the same layout can be put in: no test knows their sizes, seeds, texts or keys. A folder that holds only
some of the SETS is completed by those of tests/golden; the summary of a run names them.
"""

import os
from pathlib import Path

OWN = Path(__file__).resolve().parents[1] / "golden"
SETS = ("openvla-tiny", "openvla-oft-tiny", "smolvla-tiny", "rl_math", "rlds", "film", "towers", "lerobot")
CHOSEN = Path(os.environ.get("VLARL_GOLDEN") or OWN).resolve()


def golden_folder(name: str) -> Path:
    """The folder of one of the SETS."""
    if not CHOSEN.is_dir():
        raise FileNotFoundError(
            f"VLARL_GOLDEN names {CHOSEN}, which is not a directory: give a folder of golden arrays"
        )
    return CHOSEN / name if (CHOSEN / name).is_dir() else OWN / name
