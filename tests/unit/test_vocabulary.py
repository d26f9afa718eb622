"""Code and docs use the words of the field (docs/architecture.md, "Words"): what a researcher searches for is found.

Run as a program it prints every hit below the paths that it is given: `python tests/unit/test_vocabulary.py src docs`.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVERYWHERE = ("README.md", "CONTRIBUTING.md", "docs", "examples", "src/vlarl")
WORKERS = tuple(f"src/vlarl/{name}" for name in ("distributed", "envs", "rollout", "run", "weights"))


@dataclass(frozen=True)
class Word:
    """A word that is kept out: a pattern, what to write instead, where, and the legitimate uses of the same letters."""

    pattern: str
    instead: str
    where: tuple[str, ...] = EVERYWHERE
    fine: str | None = None  # text around a hit that makes it fine


WORDS = (
    Word(
        r"[Ff]ilm(s|ed|ing)?",
        "video, record",
        fine=r"FiLM|use_film|has_film|film_state|film_dim|.film.: config|openvla/film|openvla\.film|import film|`film`",
    ),
    Word(r"[Pp]ictures?", "image, frame"),
    Word(r"[Ss]omebody|[Nn]obody|[Ww]hoever", "the passive, or the role's name"),
    Word(r"[Ww]hereabouts|[Ss]urroundings", "location, environment"),
    Word(r"anew|[Rr]edone|torn|mend(s|ed)?", "again, retried, partial, fix", fine=r'["`]redone["`]'),
    Word(r"dealt|deals? out", "sample, assign"),
    Word(r"deviations?|moments", "std, optimizer state", fine=r"MAD|torch\.|np\."),
    Word(r"pay(s|ing)?|paid", "assign (a reward)"),
    Word(r"learnt|teach(es|ing)?|taught|lessons?", "is trained on, has a learning signal"),
    Word(r"(go|goes|going|gone|went) on", "resume, continue"),
    Word(r"[Tt]hings?", "object", fine=r"objects thing item"),  # a word of the tiny tokenizer
    Word(r"[Rr]ooms?", "resources, capacity"),
    Word(r"[Ss]ight", "attention mask"),
    Word(r"[Ss]pread(s|ing)?", "distribute; std"),
    Word(r"shares? of|[a-z]+_shares?|(a|the|its|their) share", "fraction, weight, part", fine="entropy_top_share"),
    Word(r"(is|are) no(?= (?!longer|more))", "is not a …", fine=r"[Tt]here (is|are) no "),
    Word(
        r"numbers",
        "values, dimensions, indices",
        fine=r"(random|whole|line|version|port|real|list of) numbers|: .numbers.|numbers\.(Real|Number)",
    ),
    Word(r"[Aa]sk(s|ed|ing)?|[Aa]nswer(s|ed|ing)?|[Qq]uestions?", "call, request, result", WORKERS),
    Word(
        r"[Dd]raw(s|n|ing)?|drew",
        "render",
        ("src/vlarl/envs", "src/vlarl/observability"),
        fine=r"ImageDraw(\.Draw)?|draw(: |\.(rectangle|text))",
    ),
)


def files(where: tuple[str, ...]) -> Iterator[Path]:
    for name in where:
        path = ROOT / name
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (f for f in found if f.suffix in (".py", ".md", ".yaml", ".html", ".js", ".css", ".ipynb"))


def hits(word: Word, paths: tuple[str, ...] = ()) -> list[str]:
    """file:line: the word, for every use of it that is not fine; identifiers count by their parts."""
    pattern = re.compile(rf"(?<![A-Za-z])({word.pattern})(?![a-z])")
    fine = re.compile(word.fine) if word.fine else None
    found = []
    for path in files(word.where):
        name = str(path.relative_to(ROOT))
        if paths and not name.startswith(paths):
            continue
        text = re.sub(r"~~.*?~~|film\.py", "", path.read_text(encoding="utf-8"))  # struck out in the docs; a module
        for number, line in enumerate(text.splitlines(), 1):
            cleaned = fine.sub("", line) if fine else line
            found += [f"{name}:{number}: {match.group(0)}" for match in pattern.finditer(cleaned)]
    return found


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.pattern)
def test_a_word_is_kept_out(word):
    found = hits(word)
    assert not found, f"{len(found)} uses; write {word.instead} instead: " + "; ".join(found[:20])


if __name__ == "__main__":
    for each in WORDS:
        for hit in hits(each, tuple(sys.argv[1:])):
            print(f"{hit}  -> {each.instead}")
