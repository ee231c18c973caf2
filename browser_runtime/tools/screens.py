"""Makes a small moving picture of many screenshots, and small pictures of large ones.

    screens.py moving FOLDER OUTPUT.webp    FOLDER/MILLISECONDS.png: from when on each was seen
    screens.py still PICTURE.png...         each is rewritten with fewer colours

Screens have few colours, so a palette loses nothing that can be seen, and both stay sharp at a fraction of the size.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from PIL import Image

COLOURS = 64
#: milliseconds that the last picture stays before the first one comes again
END = 5000


def reduced(path: Path) -> Image.Image:
    """With the COLOURS most frequent ones, which are exact: paper, ink and marks stay as the page has them."""
    with Image.open(path) as file:
        picture = file.convert("RGB")
    counted = sorted(picture.getcolors(picture.width * picture.height) or [], reverse=True)[:COLOURS]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in counted for part in colour])
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


def moving(folder: Path, output: Path) -> None:
    """Plays in real time: every picture stays until the next one was seen."""
    paths = sorted(folder.glob("*.png"), key=lambda path: int(path.stem))
    if not paths:
        raise SystemExit(f"error: {folder} holds no pictures")
    times = [int(path.stem) for path in paths]
    lengths = [following - time for time, following in pairwise(times)] + [END]
    first, *others = (reduced(path).convert("RGB") for path in paths)
    same = {"save_all": True, "loop": 0, "lossless": True, "method": 4, "minimize_size": True}
    first.save(output, append_images=others, duration=lengths, **same)
    size = output.stat().st_size / 1000
    print(f"{output.name}: {len(paths)} pictures, {(sum(lengths) - END) / 1000:.0f} s, {size:.0f} kB")


def still(path: Path) -> None:
    reduced(path).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["moving", folder, output]:
            moving(Path(folder), Path(output))
        case ["still", *pictures] if pictures:
            for picture in pictures:
                still(Path(picture))
        case _:
            raise SystemExit(__doc__)
