"""A page in Chromium, without a screen: run scripts in it, take a picture, measure how fast a timeline moves.

    python tools/browse.py plan.html --picture plan.png --size 1400x800 --script "timeline.follow(3)"
    python tools/browse.py plan.html --frames     # milliseconds of drawing, at each zoom from all of it to a few boxes
    python tools/browse.py site/index.html --ready true --dark --size 390x844 --picture phone.png

Needs pyside6-webengine, which has Chromium in its wheel; `python -m nox -s browser` tests with it. A script
is an expression, and may be a promise; its value is printed as a line of JSON. An error of the page ends this with 1,
and so does a page or a script that takes longer than a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

FRAMES = """(async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  const found = [], measure = async (name, act) => {
    const times = [];
    for (let turn = 0; turn < 9; turn++) {
      act(turn); await frame(); await frame();
      times.push(timeline.state.milliseconds);
    }
    times.sort((a, b) => a - b);
    found.push({ at: name, least: times[0], median: times[4], boxes: timeline.state.drawn });
  };
  timeline.fit();
  await measure("all of it", () => timeline.move(0));
  for (const share of [0.3, 0.1, 0.01, 0.001]) {
    timeline.fit(); timeline.zoom(share, 0.4);
    await measure(`${share} of it`, (turn) => timeline.move(turn % 2 ? 0.1 : -0.1));
  }
  timeline.fit(); timeline.follow(0);
  await measure("a microbatch followed", (turn) => timeline.follow(turn));
  return found;
})()"""

# The result of a script, or its error, is left in the page, where the host looks for it.
_WRAPPED = """window.browsed = undefined; (async () => ({script}))().then(
  (value) => {{ window.browsed = JSON.stringify({{ value: value === undefined ? null : value }}); }},
  (error) => {{ window.browsed = JSON.stringify({{ error: String(error) }}); }}); true"""


def main() -> int:
    """Open the page, run the scripts one after the other, take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", help="a file; or an address, http://..., as the search of the site needs")
    parser.add_argument("--size", default="1600x1000", help="pixels of the window (default: %(default)s)")
    parser.add_argument("--dark", action="store_true", help="as on a machine whose colours are dark")
    parser.add_argument("--script", action="append", default=[], help="an expression of JavaScript; again for several")
    parser.add_argument("--frames", action="store_true", help="measure a timeline at each zoom")
    parser.add_argument("--picture", type=Path, help="write a PNG at the end")
    parser.add_argument(
        "--ready", default="window.timeline", help="what is there once the page has loaded (%(default)s)"
    )
    given = parser.parse_args()
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")  # a container's root has none
    scheme = 0 if given.dark else 1  # of blink: dark, light
    flags = f"--no-sandbox --disable-gpu --blink-settings=preferredColorScheme={scheme}"
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", flags)
    from PySide6.QtCore import QEventLoop, QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEnginePage
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    errors: list[str] = []

    class Page(QWebEnginePage):  # type: ignore[misc, unused-ignore]
        def javaScriptConsoleMessage(self, level: object, message: str, line: int, source: str) -> None:  # noqa: N802
            if level is QWebEnginePage.JavaScriptConsoleMessageLevel.ErrorMessageLevel:
                errors.append(f"{source}:{line}: {message}")

    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    page = Page(view)
    view.setPage(page)
    view.resize(*map(int, given.size.split("x")))
    view.show()

    def wait(milliseconds: int) -> None:
        loop = QEventLoop()
        QTimer.singleShot(milliseconds, loop.quit)
        loop.exec()

    def value_of(script: str) -> object:
        """The first value of the script that is true."""
        end = time.monotonic() + 60
        while True:
            found: list[object] = []
            page.runJavaScript(script, found.append)
            while not found and not errors and time.monotonic() < end:
                wait(20)
            if errors or not found:
                sys.exit("\n".join([*errors, f"{given.page}: no value in a minute: {script}"]))
            if found[0]:
                return found[0]
            wait(50)

    served = given.page.startswith("http:")
    address = QUrl(given.page) if served else QUrl.fromLocalFile(str(Path(given.page).resolve()))
    view.load(address)
    # Before it there is an empty page.
    loaded = f"location.protocol == '{address.scheme()}:' && document.readyState == 'complete'"
    value_of(f"{loaded} && !!({given.ready})")
    for script in [*given.script, *([FRAMES] if given.frames else [])]:
        value_of(_WRAPPED.format(script=script))
        result = json.loads(str(value_of("window.browsed")))
        if "error" in result:
            errors.append(result["error"])
        print(json.dumps(result.get("value")), flush=True)
    if given.picture:
        wait(500)
        view.grab().save(str(given.picture))
    print("\n".join(errors), file=sys.stderr)
    page.deleteLater()
    application.processEvents()
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
