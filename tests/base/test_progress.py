"""progress.json while several threads write it."""

import json
import threading
from pathlib import Path

from pipeline.base.progress import ProgressFile


def test_the_file_is_whole_whichever_thread_writes_it(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path)
    threads = [
        threading.Thread(target=lambda n=n: [file.write({"thread": n, "text": "x" * 10_000 * n}) for _ in range(50)])
        for n in (1, 2, 3)
    ]
    file.write({"thread": 0})
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        state = json.loads((tmp_path / "progress.json").read_text())
        assert state["thread"] == 0 or state["text"] == "x" * 10_000 * state["thread"]
        assert "updated" in state
    file.remove()
    assert not list(tmp_path.iterdir())
