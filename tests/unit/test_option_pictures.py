"""The pictures of docs/which-option.md are those that the scripts give."""

from __future__ import annotations

from support.option_pictures import DOCS, PAGE, SCENES, written


def test_the_pictures_are_those_of_the_scripts():
    """Write them anew with ``PYTHONPATH=tests python -m support.option_pictures``."""
    page = PAGE.read_text(encoding="utf-8")
    anew, pictures = written(page)
    assert anew == page
    for file, picture in pictures.items():
        assert (DOCS / file).read_text(encoding="utf-8") == picture
    assert len(pictures) == len(SCENES) == len(list((DOCS / "images/options").iterdir()))
