"""The tables of a page fit a window of 1280 pixels, estimated from the style sheet and the widest letters."""

import re
from xml.etree.ElementTree import Element

import html5lib
import pytest

from hawkvision.reports.pages import source
from loadgen.reports.page import page
from tests.loadgen.runs import plausible

REM_PX = 16.0
EM_PER_LETTER = 0.64
"""Of DejaVu Sans, the widest of the style sheet's fonts: its digits."""


def rem(pattern: str) -> float:
    found = re.search(pattern, source("loadgen.reports", "page.css"))
    assert found is not None, pattern
    return float(found[1]) * REM_PX


@pytest.mark.parametrize("runs", [1, 6])
def test_tables_fit_a_window_of_1280_pixels(runs: int) -> None:
    names = ["hawkvision", "hawkvision-datagram", "infaas+fallback", "static@0.55+fallback", "split", "all-dc+fallback"]
    text = page([plausible(name, duration_s=15, slow=1 + n / 2, honest=n == 0) for n, name in enumerate(names[:runs])])
    letter_px = EM_PER_LETTER * rem(r"\ntable \{[^}]*font-size: ([.\d]+)rem")
    padding_px = 2 * rem(r"th, td \{ padding: [.\d]+rem ([.\d]+)rem")
    heading_px = rem(r"tbody th \{[^}]*min-width: ([.\d]+)rem")
    words_px = rem(r"td.words \{[^}]*min-width: ([.\d]+)rem")
    room_px = min(1265.0, rem(r"main \{ max-width: ([.\d]+)rem")) - 2 * REM_PX
    tables = html5lib.parse(text, namespaceHTMLElements=False).findall(".//table")
    assert tables
    for table in tables:
        rows = [list(row) for row in table.findall(".//tr")]
        total = 0.0
        for column in range(len(rows[0])):
            cells = [row[column] for row in rows]
            least = [_letters(cell) * letter_px for cell in cells]
            least.append(heading_px if column == 0 else words_px if "words" in cells[-1].attrib.get("class", "") else 0)
            total += max(least) + padding_px
        assert total <= room_px, f"{rows[0][0].text}: {total:.0f} px"


def _letters(cell: Element) -> int:
    """Of the longest piece of a cell that is not broken."""
    wraps = cell.tag == "th" or "words" in cell.attrib.get("class", "")
    own = "".join([cell.text or "", *(part.tail or "" for part in cell)])
    pieces = own.split() if wraps else [own]
    small = [word for part in cell.findall("small") for word in re.split(r"[\s–]+", part.text or "")]
    return max(map(len, [*pieces, *small]), default=0)
