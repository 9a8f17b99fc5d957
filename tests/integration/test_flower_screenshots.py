"""The screenshots in the docs are made here: ``CSL_SCREENSHOTS=1`` writes them to docs/images."""

from __future__ import annotations

import os
import re

import pytest

from support.flower import needs_flower
from support.screenshots import IMAGES, make_screenshots

pytestmark = [
    pytest.mark.needs_real_redis("Flower reads it from another process"),
    pytest.mark.timeout(240),
]


@pytest.mark.full
def test_each_screenshot_of_the_docs_is_made_and_shown(redis_provider, tmp_path):
    """None is left over, and the docs name no other one."""
    needs_flower()
    folder = IMAGES if os.environ.get("CSL_SCREENSHOTS") else tmp_path / "images"
    folder.mkdir(exist_ok=True)
    make_screenshots(folder, tmp_path, redis_provider)
    made = {path.name for path in folder.glob("flower-*.png")}
    assert made == {path.name for path in IMAGES.glob("flower-*.png")}
    assert min(path.stat().st_size for path in folder.glob("flower-*.png")) > 10_000
    docs = (IMAGES.parent / "flower.md").read_text(encoding="utf-8")
    assert set(re.findall(r"images/(flower-[\w-]+\.png)", docs)) <= made
