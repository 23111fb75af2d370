"""The hero views as pictures, to be looked at: `cd tests && ../.venv/bin/python -m browser.heroes` writes them to browser/heroes/."""
from __future__ import annotations

import tempfile
from pathlib import Path

import made_analyses
import made_up
from PIL import Image, ImageChops
from playwright.sync_api import Browser, sync_playwright

from browser.conftest import CHROMIUM

HEROES = {"sweep": lambda: made_up.sweep(prompts=1), "logit_lens": lambda: made_analyses.lens((8,), ("embed", *range(6))),
          "attention": made_up.attention}
THEMES = {"light": ("#fff", "#000"), "dark": ("#111", "#ddd")}
MOST = 60_000  # bytes of a picture


def draw(browser: Browser, name: str, folder: Path) -> Path:
    """Save a view, light beside dark, as one picture of few colours."""
    shots = []
    for back, front in THEMES.values():
        page = browser.new_page(viewport={"width": 580, "height": 200})
        style = f"background:{back};color:{front};font:14px sans-serif;zoom:0.75"
        page.set_content(f"<meta charset=utf-8><body style='{style}'>{HEROES[name]()._repr_html_()}")
        page.wait_for_timeout(500)
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            page.screenshot(path=file.name, full_page=True)
            shots.append(Image.open(file.name).convert("RGB"))
        page.close()
    _, _, right, bottom = ImageChops.difference(shots[0], Image.new("RGB", shots[0].size, "#fff")).getbbox()
    shots = [shot.crop((0, 0, right + 8, bottom + 8)) for shot in shots]
    both = Image.new("RGB", (sum(shot.width for shot in shots), shots[0].height))
    for i, shot in enumerate(shots):
        both.paste(shot, (i * shot.width, 0))
    path = folder / f"{name}.png"
    for colours in (64, 48, 32):
        both.quantize(colours).save(path, optimize=True)
        if path.stat().st_size < MOST:
            break
    return path


def main() -> None:
    """Draw all of them."""
    folder = Path(__file__).with_name("heroes")
    folder.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name in HEROES:
            path = draw(browser, name, folder)
            print(f"{path}: {path.stat().st_size} bytes")
        browser.close()


if __name__ == "__main__":
    main()
