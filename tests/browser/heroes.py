"""The hero views of the embedded model as pictures, to be looked at: `cd tests && ../.venv/bin/python -m browser.heroes`."""
from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image, ImageChops
from playwright.sync_api import Browser, sync_playwright

import mia_lab as mia
from browser.conftest import CHROMIUM

PROMPT = "The Eiffel Tower is in the city of"
GLAD, GLOOMY = ([" happy", " wonderful", " beautiful", " great", " lovely"], [" sad", " terrible", " horrible", " awful", " miserable"])
THEMES = {"light": ("#fff", "#000"), "dark": ("#111", "#ddd")}
MOST, TALLEST = 60_000, 900  # bytes and pixels of a picture


def views(session: mia.Session) -> dict[str, str]:
    """The HTML of each hero."""
    parts = mia.Pairs.of(mia.dataset("sentiment_pairs")).split()
    prompts = mia.dataset("sentiment_prompts")
    sweep = session.sweep(session.vector(parts.fit)[9], mia.grid(-0.3, 0.3, 7), prompts, [mia.token_odds(GLAD, GLOOMY), mia.length()],
                          pairs=parts.fit, guards=[mia.kl(3), mia.perplexity(3)], placebo_prompts=4, progress=False)
    return {"sweep": sweep._repr_html_(), "logit_lens": session.logit_lens(PROMPT, layers=["embed", *range(1, 18, 2)])._repr_html_(),
            "attention": session.attention(PROMPT, layers=[5, 11])._repr_html_()}


def draw(browser: Browser, name: str, html: str, folder: Path) -> Path:
    """Save a view, light beside dark, as one picture of few colours."""
    shots = []
    for back, front in THEMES.values():
        page = browser.new_page(viewport={"width": 580, "height": 200})
        style = f"background:{back};color:{front};font:14px sans-serif;zoom:0.75"
        page.set_content(f"<meta charset=utf-8><body style='{style}'>{html}")
        page.wait_for_timeout(500)
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            page.screenshot(path=file.name, full_page=True)
            shots.append(Image.open(file.name).convert("RGB"))
        page.close()
    _, _, right, bottom = ImageChops.difference(shots[0], Image.new("RGB", shots[0].size, "#fff")).getbbox()
    shots = [shot.crop((0, 0, right + 8, min(bottom + 8, TALLEST))) for shot in shots]
    both = Image.new("RGB", (sum(shot.width for shot in shots), shots[0].height))
    for i, shot in enumerate(shots):
        both.paste(shot, (i * shot.width, 0))
    path = folder / f"{name}.png"
    for colours in (64, 48, 32, 16, 12):
        both.quantize(colours).save(path, optimize=True)
        if path.stat().st_size < MOST:
            break
    return path


def main() -> None:
    """Draw all of them."""
    folder = Path(__file__).with_name("heroes")
    folder.mkdir(exist_ok=True)
    with mia.Session("demo", points=["resid_pre", "resid_post", "pattern"], enforce_eager=True) as session:
        found = views(session)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, html in found.items():
            path = draw(browser, name, html, folder)
            print(f"{path}: {path.stat().st_size} bytes")
        browser.close()


if __name__ == "__main__":
    main()
