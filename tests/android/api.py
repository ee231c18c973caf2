"""The Kotlin library's public API, read from its sources, where explicit API mode marks every public declaration.

`python -m tests.android.api` writes it to android_demo/api.txt, which test_api.py compares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from android_demo.ci.core import PROJECT

DUMP = PROJECT / "api.txt"
SOURCES = [PROJECT / module / "kotlin" for module in ("core/src/main", "engines/src/main", "core/src/testFixtures")]
PUBLIC = re.compile(r"^ *(?:@[\w:]+ )*public ")
#: an entry of an enum
ENTRY = re.compile(r"^    ([A-Z][A-Z_]+)\b")
TYPE = re.compile(r"\b(?:class|interface|object) ([A-Z]\w*)")


@dataclass(frozen=True)
class Declaration:
    """A public declaration, or an entry of a public enum.

    text: its header on one line, indented as it stands; engine: for engines alone; documented: KDoc stands above it, or
    above the block of properties that it is in.
    """

    file: Path
    text: str
    engine: bool
    documented: bool

    @property
    def for_tests(self) -> bool:
        """It is in the artifact for an app's tests."""
        return "testFixtures" in self.file.parts

    @property
    def type(self) -> str | None:
        """The name of the type that it declares at the top of its file, if it does."""
        found = TYPE.search(self.text.split("(")[0])
        return found[1] if found and not self.text.startswith(" ") else None


def declarations(file: Path) -> list[Declaration]:
    """The public declarations of a Kotlin file in their order; parameters are part of what they belong to."""
    lines = file.read_text(encoding="utf-8").splitlines()
    found: list[Declaration] = []
    after = documented = 0  # the line behind the last declaration; whether that has KDoc
    outer = ""
    for number, line in enumerate(lines):
        entry = ENTRY.match(line) if "public enum class" in outer else None
        if line.startswith(("}", "internal ", "private ")):
            outer = ""
        if number < after or not (entry or PUBLIC.match(line)):
            continue
        above = number - 1
        while lines[above].strip().startswith("@"):
            above -= 1
        block = above == after - 1 and bool(documented) and lines[above].startswith("    public v")
        documented = lines[above].strip().endswith("*/") or block
        text, after = (f"    {entry[1]}", number + 1) if entry else header(lines, number)
        engine = "@EngineApi" in lines[above + 1 : number] or "annotation class" in text
        found.append(
            Declaration(file, text, engine, documented or re.search("companion|constructor", text) is not None)
        )
        outer = outer if line.startswith(" ") else text
    return found


def header(lines: list[str], number: int) -> tuple[str, int]:
    """The declaration that begins on a line, up to its body, as one line; and the number of the line behind it."""
    text, depth = lines[number], 0
    for end in range(number, len(lines)):
        text = text if end == number else f"{text} {lines[end].strip()}"
        depth = sum(text.count(one) for one in "([") - sum(text.count(one) for one in ")]")
        if depth == 0:
            break
    for at, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if depth == 0 and re.match(r" (?:\{|= |=$|get\(\))|;", text[at:]):
            text = text[:at]
            break
    text = re.sub(r"/\*\*.*?\*/ ", "", text).replace("( ", "(").replace(", )", ")")
    text = re.sub(r" : this\(.*", "", text)
    if re.search(
        r"\b(internal|private) constructor\(", text
    ):  # its parameters are not for others, its properties may be
        text = re.sub(r"(?<=[(,]) ?(?:internal |private |(?!(?:@[\w:]+ )*public )\w)[^,)]*(?:\(\))?[^,)]*", "", text)
        text = re.sub(r"\(,+ ?", "(", re.sub(r",+(?=[,)])", "", text))
    return text, end + 1


def everything() -> list[Declaration]:
    """The whole library's."""
    return [one for root in SOURCES for file in sorted(root.rglob("*.kt")) for one in declarations(file)]


def dump() -> str:
    """All of it as text, by package and file."""
    parts, last = [], None
    for one in everything():
        if one.file != last:
            last = one.file
            parts.append(f"\n{'.'.join(last.parts[last.parts.index('dev') : -1])}  {last.name}")
        parts.append(f"{one.text}{'  // engines' if one.engine and not one.text.startswith(' ') else ''}")
    return "\n".join(parts).lstrip() + "\n"


if __name__ == "__main__":
    DUMP.write_text(dump(), encoding="utf-8")
