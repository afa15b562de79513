"""Pages in a real browser: Chromium, driven by Playwright. The fixture `browser` of conftest.py
skips where one of them is absent.
"""

import os
import shutil

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
DESKTOP = dict(viewport={"width": 1280, "height": 900})
PATIENCE_MS = 120_000  # on a machine that does other work
PHONE = dict(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
CONTRAST = ["color-contrast"]  # what another colour scheme changes
PAGES = (
    "test_lanes_in_browser.py",
    "test_report_in_browser.py",
    "test_serve_page_in_browser.py",
)
# Raised by Playwright's driver when its event loop is collected.
DRIVER_WARNINGS = ("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


def launched():
    """One browser, until the generator ends."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("no Chromium here (CHROMIUM names one)")
    with api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def watched(context):
    """An empty page, the addresses it asks for, and what it complains of, as they come."""
    page, requests, complaints = context.new_page(), [], []
    page.set_default_timeout(PATIENCE_MS)
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    return page, requests, complaints


def faults(page, impacts=("serious", "critical"), rules=None):
    """What axe finds wrong with a page for those who do not see or do not use a mouse, by rules."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    options = {"resultTypes": ["violations"]}  # not each of thousands of elements that is right
    run = axe.Axe().run(page, options=options | ({"runOnly": rules} if rules else {}))
    found = [f for f in run.response["violations"] if f["impact"] in impacts]
    return [(f["id"], f["nodes"][0]["html"][:200]) for f in found]
