"""The drawings in docs/design.md, made from the code: `python -m tests.drawings` writes them anew."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.session.states import TRANSITIONS, State
from tests.arrows import floors, imports_below, inner_rooms

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "design.md"


def rooms_drawing(package: str) -> str:
    """The rooms of `package` by floor, from the top, each with those that it imports."""
    arrows = inner_rooms(list(imports_below(ROOT, (package,))), package)
    levels = floors(arrows)
    width = max(map(len, arrows))
    lines = [
        f"{levels[room]}  {room:{width}}  {', '.join(sorted(arrows[room], key=lambda other: (-levels[other], other)))}"
        for room in sorted(arrows, key=lambda room: (-levels[room], room))
    ]
    return "\n".join(["```", *(line.rstrip() for line in lines), "```"])


def states_drawing() -> str:
    """The states of an answer as a Mermaid diagram; CANCEL and STOP, which end it from everywhere, are left out."""
    names = {state: state.name.lower() for state in State}
    lines = [f"    {names[state]}: {state}" for state in State]
    for state, events in TRANSITIONS.items():
        ways: dict[State, list[str]] = {}
        for event, afters in events.items():
            for after in afters:
                ways.setdefault(after, []).append(event)
        lines += [f"    {names[state]} --> {names[after]}: {', '.join(by)}" for after, by in ways.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {names[State.DRAFTING]}", *lines, "```"])


def drawn(document: str) -> str:
    """`document` with each drawing, between `<!-- drawing: NAME -->` and `<!-- end -->`, as the code is now."""
    for name, drawing in (("edge_runtime", rooms_drawing("edge_runtime")), ("states", states_drawing())):
        begin, end = f"<!-- drawing: {name} -->\n", "<!-- end -->"
        before, found, rest = document.partition(begin)
        assert found, f"docs/design.md has no place for the drawing {name}"
        document = before + begin + drawing + "\n" + end + rest.partition(end)[2]
    return document


if __name__ == "__main__":
    DOCUMENT.write_text(drawn(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
