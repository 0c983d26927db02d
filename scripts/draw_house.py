"""Draw who takes from whom among the rooms of ``src/blockdraft``: docs/house.svg, from the imports.

python scripts/draw_house.py
"""

import sys
from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.test_layout import ROOMS, SOURCE, imports_of, room_of, texts  # noqa: E402

PLACE = ROOT / "docs" / "house.svg"
STEP, TOP, LEFT, WIDE = 34, 20, 320, 170  # pixels: from floor to floor; of the boxes
COLOURS = ("#3b6fb6", "#c2603f", "#4f8f4f", "#8a5fa8", "#b08a2e", "#3d8f96", "#a84f6f", "#6b6b6b")


def arrows() -> Counter[tuple[str, str]]:
    """How many imports lead from one room into another."""
    found: Counter[tuple[str, str]] = Counter()
    for name, text in texts().items():
        for other, _, _ in imports_of(text) if name != "__init__" else ():
            if room_of(other) and room_of(name) != room_of(other):
                found[room_of(name), room_of(other)] += 1
    return found


def draw() -> str:
    """The picture: floors in order, every arrow an arc that leads down; what a room takes is drawn in its colour.

    Arcs into the three rooms that everybody uses are left out.
    """
    common = ROOMS[-3:]
    floors = {room: TOP + STEP * i for i, room in enumerate(ROOMS)}
    colour = {room: COLOURS[i % len(COLOURS)] for i, room in enumerate(ROOMS)}
    height = TOP + STEP * len(ROOMS) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * LEFT + WIDE} {height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#444"/></marker></defs>',
    ]
    for (room, other), count in sorted(arrows().items(), key=lambda entry: (ROOMS.index(entry[0][0]), ROOMS.index(entry[0][1]))):
        if other in common:
            continue
        begin, end = floors[room] + 13, floors[other] + 13
        right = ROOMS.index(room) % 2 == 0  # half of the arcs on either side
        edge, way = (LEFT + WIDE, 1) if right else (LEFT, -1)
        far = edge + way * min(LEFT - 20, 24 + 0.52 * (end - begin))
        parts.append(
            f'<path d="M{edge} {begin} C{far:.0f} {begin} {far:.0f} {end} {edge} {end}" fill="none" stroke="{colour[room]}" '
            f'stroke-width="{min(4, 0.8 + count / 8):.1f}" stroke-opacity="0.75" marker-end="url(#tip)">'
            f"<title>{room} takes from {other}: {count} imports</title></path>"
        )
    for room, y in floors.items():
        label = f"{room}/" if (SOURCE / room).is_dir() else f"{room}.py"
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDE}" height="26" rx="5" fill="#f6f4ef" stroke="{colour[room]}"/>'
            f'<text x="{LEFT + WIDE / 2}" y="{y + 17}" text-anchor="middle">{escape(label)}</text>'
        )
    parts.append(
        f'<text x="{LEFT + WIDE / 2}" y="{height - 12}" text-anchor="middle" fill="#666">'
        f"everybody uses {', '.join(common)}; these arrows are left out</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PLACE.write_text(draw())
    print(PLACE.relative_to(ROOT))
