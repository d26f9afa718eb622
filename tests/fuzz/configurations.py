"""Configurations that nobody should have to write: damaged YAML, wrong types, absurd values, unknown flags.

`vlarl train --dry-run` and `vlarl finetune --dry-run` must take each one or refuse it with a message, within seconds,
and leave nothing in the working folder. What is taken is read back from what was printed, and must be the same.
"""

import random
import string
from collections.abc import Callable, Sequence
from functools import cache

import yaml
from fuzz.answers import DONE, PACKAGE, ask, judged, litter
from fuzz.harness import Case, Defect, Row

from vlarl.config.describe import Option, options
from vlarl.config.source.flags import ALIASES
from vlarl.config.source.load import COMMANDS
from vlarl.config.source.presets import presets_of

FILE = "mine.yaml"
Mutated = tuple[bytes | None, list[str]]  # the file, or none; and flags
Mutation = Callable[[random.Random, str], Mutated]

LONG = 100_000
ABSURD: tuple[object, ...] = (
    *(0, -1, 1, 2**31, 2**63, 2**64, 10**30, 10**400, -(10**30), 1e30, 1e308, -1e308, 1e-320, 0.1, -0.0),
    *(float("inf"), float("-inf"), float("nan"), True, False, None, "", " ", "~", "null", "none", "yes", "nan", "1e5"),
    *("x" * 256, "x" * LONG, "../../etc/passwd", "/dev/null", "/proc/self/mem", "~", "~root", ".", "..", "/", "\x00"),
    *("a\nb", "a\tb", "\x1b[31m", "\ud7ff\ue000", "💥", "{x}", "%s%n", "$(id)", "`id`", "module:function", "os:_exit"),
    *("builtin:", "init:", "http://", "http://[", "ftp://x", "http://u:p@h/", "cuda:99", "meta", "mps", ":", "a:b:c"),
    *([], [[]], [None], [0, 0], [-1], [10**30], ["x"], list(range(2000)), {}, {"a": 1}, {"a": {"b": {"c": 1}}}),
)
TEXTS = (
    "train",
    "--",
    "-",
    "---x",
    "--=",
    "--=1",
    "-x",
    "--no-",
    "--no-no-optim.lr",
    "--optim.",
    "--.lr",
    "--optim",
    "=",
)


@cache
def known(command: str) -> dict[str, Option]:
    """All options of a command."""
    return options(COMMANDS[command])


@cache
def preset_texts(command: str) -> dict[str, str]:
    """The shipped files of a command by name."""
    return {name: (PACKAGE / "configs" / f"{name}.yaml").read_text() for name in presets_of(COMMANDS[command])}


def _base(rng: random.Random, command: str) -> str:
    return rng.choice(sorted(preset_texts(command).values()))


def _tree(rng: random.Random, command: str) -> dict:
    return yaml.safe_load(_base(rng, command))


def _dumped(tree: object) -> bytes:
    return yaml.dump(tree, sort_keys=False, allow_unicode=True).encode(errors="surrogatepass")


# Bytes.


def flipped_bytes(rng: random.Random, command: str) -> Mutated:
    data = bytearray(_base(rng, command).encode())
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data), []


def control_characters(rng: random.Random, command: str) -> Mutated:
    data = _base(rng, command)
    for _ in range(rng.choice((1, 3))):
        place = rng.randrange(len(data))
        data = data[:place] + rng.choice("\x00\x01\x07\x08\x0b\x0c\x1b\x7f\x85\u2028\ufeff\ufffe") + data[place:]
    return data.encode(), []


def truncated(rng: random.Random, command: str) -> Mutated:
    data = _base(rng, command).encode()
    return data[: rng.randrange(len(data))], []


def other_encodings(rng: random.Random, command: str) -> Mutated:
    text = "run:\n  name: " + rng.choice(("grün", "日本", "x")) + "\n"
    encoding = rng.choice(("utf-16", "utf-16-be", "utf-32", "latin-1", "cp037", "utf-8-sig"))
    return text.encode(encoding, errors="replace"), []


def spliced_lines(rng: random.Random, command: str) -> Mutated:
    lines = _base(rng, command).splitlines(keepends=True) + _base(rng, command).splitlines(keepends=True)
    rng.shuffle(lines)
    return "".join(lines[: rng.randrange(1, len(lines))]).encode(), []


def shifted_indents(rng: random.Random, command: str) -> Mutated:
    lines = _base(rng, command).splitlines()
    for _ in range(rng.choice((1, 3))):
        place = rng.randrange(len(lines))
        lines[place] = rng.choice((" ", "  ", "\t", "- ", "? ", ": ", "    ")) + lines[place]
    return "\n".join(lines).encode(), []


# YAML.


def wrong_tags(rng: random.Random, command: str) -> Mutated:
    tags = (
        "!!bool maybe",
        "!!int x",
        "!!int ''",
        "!!float x",
        "!!null x",
        "!!timestamp 2024-99-99",
        "!!binary %",
        "!x y",
    )
    more = ("!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!python/object/apply:os.system [id]", "!!str [a]")
    numbers = ("!!int 0x", "!!int 1_", "!!int -", "!!bool ''", "!!map x", "!!seq {}", "!!merge x", "!!timestamp ''")
    path = rng.choice(sorted(known(command)))
    section, _, name = path.partition(".")
    value = rng.choice((*tags, *more, *numbers))
    return f"{section}:\n  {name}: {value}\n".encode(), []


def anchors(rng: random.Random, command: str) -> Mutated:
    width, depth = rng.choice(((10, 30), (2, 200), (9, 9), (1000, 2)))
    kind = rng.choice(("lists", "merges", "self", "maps", "unknown"))
    if kind == "self":
        return b"run: &a\n  name: x\n  root: *a\n", []
    if kind == "unknown":
        return b"run: *nothing\n", []
    lines = ["a0: &a0 [x]" if kind == "lists" else "a0: &a0 {x: 1}"]
    for level in range(1, depth):
        inner = ", ".join([f"*a{level - 1}"] * width)
        body = {"lists": f"[{inner}]", "merges": f"{{<<: [{inner}]}}"}.get(
            kind, "{" + ", ".join(f"k{i}: *a{level - 1}" for i in range(width)) + "}"
        )
        lines.append(f"a{level}: &a{level} {body}")
    lines.append(f"run: {{name: *a{depth - 1}}}" if rng.random() < 0.5 else f"run: *a{depth - 1}")
    return "\n".join(lines).encode(), []


def deep_nesting(rng: random.Random, command: str) -> Mutated:
    depth = rng.choice((50, 500, 5_000, 50_000))
    kind = rng.choice(("[", "{a: ", "- ", "lines"))
    if kind == "lines":
        return "".join(f"{' ' * level}a:\n" for level in range(min(depth, 2_000))).encode(), []
    text = kind * depth + ("]" * depth if kind == "[" else "}" * depth if kind == "{a: " else "x")
    return f"run:\n  name: {text}\n".encode(), []


def dotted_keys(rng: random.Random, command: str) -> Mutated:
    paths = rng.sample(sorted(known(command)), 3)
    lines = [
        f"{path}: {yaml.dump(known(command)[path].default, default_flow_style=True).split(chr(10))[0]}"
        for path in paths
    ]
    if rng.random() < 0.5:
        lines.append("run:\n  seed: 1\n  run.seed: 2")
    return "\n".join(lines).encode(), []


def repeated_keys(rng: random.Random, command: str) -> Mutated:
    text = _base(rng, command)
    return (text + "\n" + (text if rng.random() < 0.5 else f"{rng.choice(text.split(':'))}: 1")).encode(), []


def odd_keys(rng: random.Random, command: str) -> Mutated:
    key = rng.choice(
        ("1", "1.5", "null", "true", "[a, b]", "{a: b}", "? [x]\n", "''", "'  '", "<<", "!!binary aGk=", "2024-01-01")
    )
    return (f"{key}: 1\nrun: {{seed: 1}}\n" if rng.random() < 0.5 else f"run:\n  {key}: 1\n").encode(), []


def many_documents(rng: random.Random, command: str) -> Mutated:
    text = rng.choice(
        ("---\n---\n", "%YAML 9.9\n---\nrun: {}\n", "...\nrun: {}\n", "- a\n- b\n", "just text", "", "\n\n", "# only\n")
    )
    return text.encode(), []


def large_files(rng: random.Random, command: str) -> Mutated:
    count = rng.choice((1_000, 5_000))
    kind = rng.choice(("unknown sections", "unknown options", "long list", "long name"))
    if kind == "unknown sections":
        return "".join(f"section{i}: {{a: 1}}\n" for i in range(count)).encode(), []
    if kind == "unknown options":
        return ("run:\n" + "".join(f"  option{i}: 1\n" for i in range(count))).encode(), []
    if kind == "long list":
        path = rng.choice([path for path, option in known(command).items() if option.is_list])
        section, _, name = path.partition(".")
        return f"{section}: {{{name}: [{', '.join(['0'] * count)}]}}".encode(), []
    return f"run: {{name: {'x' * LONG}}}".encode(), []


# Values.


def absurd_values(rng: random.Random, command: str) -> Mutated:
    tree = _tree(rng, command)
    for path in rng.sample(sorted(known(command)), rng.choice((1, 1, 2, 6))):
        section, _, name = path.partition(".")
        tree.setdefault(section, {})[name] = rng.choice(ABSURD)
    return _dumped(tree), []


def replaced_sections(rng: random.Random, command: str) -> Mutated:
    tree = _tree(rng, command)
    section = rng.choice(sorted(COMMANDS[command].model_fields))
    tree[section] = rng.choice(ABSURD)
    return _dumped(tree), []


def misspelt_names(rng: random.Random, command: str) -> Mutated:
    path = rng.choice(sorted(known(command)))
    section, _, name = path.partition(".")
    letters = list(name)
    letters[rng.randrange(len(letters))] = rng.choice(string.ascii_letters + "._- ")
    return _dumped({section: {"".join(letters): known(command)[path].default}}), []


def other_command(rng: random.Random, command: str) -> Mutated:
    other = "finetune" if command == "train" else "train"
    return _base(rng, other).encode(), []


# Flags.


def absurd_flags(rng: random.Random, command: str) -> Mutated:
    flags = []
    for path in rng.sample(sorted(known(command)), rng.choice((1, 2, 5))):
        value = rng.choice(ABSURD)
        text = value if isinstance(value, str) else yaml.dump(value, default_flow_style=True).split("\n...")[0].strip()
        flags += rng.choice(([f"--{path}", text], [f"--{path}={text}"]))
    return None, flags


def combined_options(rng: random.Random, command: str) -> Mutated:
    """Values that are each allowed, of options that may not fit together."""
    flags = []
    for path in rng.sample(sorted(known(command)), rng.choice((1, 1, 2, 4))):
        option = known(command)[path]
        if option.is_flag:
            flags.append(f"--{path}" if rng.random() < 0.7 else f"--no-{path}")
        elif option.choices:
            flags += [f"--{path}", rng.choice(option.choices)]
        elif option.is_text:
            flags += [f"--{path}", rng.choice(("auto", "cpu", "gym", "tabletop_goal", "libero_10", "remote", "rules"))]
        else:
            flags += [f"--{path}", rng.choice(("1", "2", "0.5", "8", "64", "null"))]
    return None, flags


def unknown_flags(rng: random.Random, command: str) -> Mutated:
    path = rng.choice((*known(command), *ALIASES))
    letters = list(path)
    for _ in range(rng.choice((1, 2, 6))):
        letters[rng.randrange(len(letters))] = rng.choice(string.ascii_letters + "._-=")
    return None, [f"--{''.join(letters)}", *rng.sample(("1", "x", "-1", "--", ""), rng.randrange(3))]


def odd_tokens(rng: random.Random, command: str) -> Mutated:
    return None, [
        rng.choice((*TEXTS, *(text for text in ABSURD if isinstance(text, str) and "\x00" not in text)))
        for _ in range(rng.choice((1, 2, 4)))
    ]


def aliases(rng: random.Random, command: str) -> Mutated:
    chosen = rng.sample(sorted(ALIASES), rng.choice((1, 3)))
    tokens = [token for name in chosen for token in (f"--{name}", rng.choice(("1", "0.5", "true", "x", "cpu", "-1")))]
    return None, [
        token.replace("-", "_") if token.startswith("--") and rng.random() < 0.3 else token for token in tokens
    ]


def hydra(rng: random.Random, command: str) -> Mutated:
    path = rng.choice(sorted(known(command)))
    return None, [rng.choice((f"{path}=1", f"+{path}=1", f"~{path}", f"{path}:1", f"++{path}=x"))]


def odd_sources(rng: random.Random, command: str) -> Mutated:
    sources = (
        "nothing",
        "nothing.yaml",
        ".",
        "/",
        "/dev/null",
        "/etc/passwd",
        "tabletop_grpo.yaml",
        "TABLETOP_GRPO",
        "",
    )
    return None, [
        rng.choice((*sources, "x" * 300, "x" * LONG, "a/b/c.yaml", "~/x.yaml", "tabletop_grpo tabletop_ppo", "../x"))
    ]


def odd_paths(rng: random.Random, command: str) -> Mutated:
    option = rng.choice([path for path, one in known(command).items() if one.is_text])
    value = rng.choice(
        (
            "x" * 256,
            "/proc/x",
            "/dev/null",
            "a/b",
            "..",
            ".",
            "/",
            "~",
            "~nobody/x",
            "a\nb",
            "\x1b[2J",
            "con",
            "💥" * 80,
        )
    )
    return None, [f"--{option}", value]


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__.replace("_", " "): mutation
    for mutation in (
        *(flipped_bytes, control_characters, truncated, other_encodings, spliced_lines, shifted_indents),
        *(wrong_tags, anchors, deep_nesting, dotted_keys, repeated_keys, odd_keys, many_documents, large_files),
        *(absurd_values, replaced_sections, misspelt_names, other_command),
        *(absurd_flags, combined_options, unknown_flags, odd_tokens, aliases, hydra, odd_sources, odd_paths),
    )
}


def run(case: Case) -> tuple[str, Sequence[Defect]]:
    """Ask for a dry run of a mutant, and of what it printed."""
    rng = case.rng()
    command = rng.choice(("train", "train", "train", "finetune"))
    data, flags = MUTATIONS[case.mutation](rng, command)
    source = []
    if data is not None:
        (case.folder / FILE).write_bytes(data)
        source = [FILE]
    elif case.mutation != "odd sources" and rng.random() < 0.6:
        source = [rng.choice(sorted(preset_texts(command)))]
    arguments = [command, *source, *flags, "--dry-run"]
    shown = " ".join(argument[:200] for argument in arguments)
    answer = ask(arguments, case.folder)
    wrote = data[:300].decode(errors="replace") if data is not None else ""
    defects = judged(answer, what=f"vlarl {shown!r}\n{wrote}")
    defects += litter(case.folder, source)
    if answer.code == DONE and not defects and "# derived" in answer.out:
        defects += _read_back(case, command, answer.out)
    return ("worked" if answer.code == DONE else "refused"), defects


def _read_back(case: Case, command: str, printed: str) -> list[Defect]:
    """What was printed is a configuration, and the same one."""
    (case.folder / "printed.yaml").write_text(printed)
    again = ask([command, "printed.yaml", "--dry-run"], case.folder)
    if again.code == DONE and _configuration(again.out) == _configuration(printed):
        return []
    return [Defect("wrong", f"what --dry-run printed is not read back as it was:\n{again.raised or again.text}")]


def _configuration(printed: str) -> str:
    """What `--dry-run` prints without its head, which names what it started from."""
    return printed[printed.index("\nrun:\n") :]


ROW = Row(
    name="configurations",
    about="YAML files and flags of `vlarl train` and `vlarl finetune`: damaged bytes, tags, anchors, nesting, wrong "
    "types, absurd values, unknown and contradicting options; an accepted configuration must be read back the same",
    mutations=tuple(MUTATIONS),
    cases=2_080,
    deadline_s=15.0,
    run=run,
)
