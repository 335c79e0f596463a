"""Progress of long work on stderr: a bar on a terminal, a line for each part elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FEW_LINES_S = 5.0  # between lines about the arrays of a checkpoint, which are hundreds
Progress = Callable[[str, float], None]  # what is being done, share of the whole that is behind


def silent(what: str, share: float) -> None:
    """No progress shown."""


@contextmanager
def shown(title: str, pause_s: float = 0.0) -> Iterator[Progress]:
    """Shows progress under a title for as long as the block runs; `pause_s` lies between two lines, so that many small
    parts give few, and none if all is done sooner."""
    if not sys.stderr.isatty():
        start = last = time.perf_counter()

        def write(what: str, share: float) -> None:
            nonlocal last
            now = time.perf_counter()
            if now - last >= pause_s:
                last = now
                print(f"{title}: {100 * share:3.0f} % {now - start:6.1f} s  {what}", file=sys.stderr)

        yield write
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda what, share: bar.update(task, description=f"{title}: {what}", completed=share)
