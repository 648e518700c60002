"""metrics.jsonl: what a repair removes, what MLflow may keep of it, and lines that a kill cut short."""

from pathlib import Path

from pipeline.base.metric import Metric
from pipeline.monitor.metrics_file import Record, by_name, open_to_append, read_metrics, repair
from pipeline.monitor.page_folder import PageFolder
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.settings.run import TrackConfig


def write(path: Path, *records: tuple[int, dict[str, float]]) -> list[bytes]:
    lines = [Record(step, 1000 + step, metrics).to_line() for step, metrics in records]
    path.write_bytes(b"".join(lines))
    return lines


def test_a_file_in_order_is_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = write(path, (1, {"loss": 1.0}), (2, {"loss": 0.5}), (2, {"top1": 0.1}))
    assert repair(path, 2) == ({"loss": 0.5, "top1": 0.1}, [])
    assert path.read_bytes() == b"".join(lines)


def test_later_steps_and_a_damaged_end_are_cut_off(tmp_path: Path) -> None:
    """With forms of JSON that another program may write. A damaged line before the cut is left to readers, which count
    it.
    """
    damaged = [
        b"\n",
        b'{"step": 2, "time": 5, "metrics": {"a": 1.0, }}\n',
        b'{"step": 2, "time": 5, "metrics": {"a": 01}}\n',
        b'{"step": 2, "time": 5, "metrics": {"\xff": 1}}\n',
        b'{"step": 2, "time": 5, "metrics": {"a": null}}\n',
    ]
    kept = [
        Record(1, 1001, {"loss": float("nan"), "lr": -float("inf"), "skipped": 2}).to_line(),
        damaged[1],
        b'{"metrics":{"\xc3\xa4\\u00e9":1e-3, "loss": 0.5},"time":5,"step":2}\n',
        damaged[2],
        Record(2, 1003, {"loss": 0.25}).to_line(),
    ]
    later = [Record(3, 1004, {}).to_line(), Record(4, 1005, {"loss": 0.1}).to_line(), b'{"step": 5, "ti']
    (path := tmp_path / "metrics.jsonl").write_bytes(b"".join([*kept, *damaged, *later]))
    for num_notes in (1, 0):
        logged, notes = repair(path, 2)
        assert (logged, len(notes)) == ({"äé": 0.001, "loss": 0.25}, num_notes)
        assert path.read_bytes() == b"".join(kept)
    records, num_damaged = read_metrics(path)
    assert (by_name(records)["loss"][2], num_damaged) == (0.25, 2)
    assert repair(path, 0) == ({}, [f"{path}: removed 5 lines, damaged or after step 0, from which the run continues"])
    assert not path.read_bytes()
    assert repair(path, 0) == ({}, [])


def test_names_that_mlflow_refuses_lose_no_record(tmp_path: Path) -> None:
    """They were damaged lines: nothing of a study of R50+ViT arrived, and a resumed run removed them."""
    declared = {"photos (2)_20nn": Metric("share", "higher", "probe")}
    facts = RunFacts("a", "pretrain", metrics=declared, score="photos (2)_20nn")
    tracker = Tracker(TrackConfig(enabled=False), tmp_path, tmp_path / "run", facts)
    tracker.log(1, {"photos (2)_20nn": 0.5, "best_R50+ViT-B/16": 0.75, ".a_20nn": 1.0})
    tracker.finish("FINISHED")
    (record,), num_damaged = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record.metrics == {"photos _2__20nn": 0.5, "best_R50_ViT-B/16": 0.75, "_a_20nn": 1.0}
    assert num_damaged == 0
    saved = PageFolder(tmp_path / "run").read_facts().facts
    assert saved.as_sent(record.metrics)["score_knn"] == 50
    assert saved.metric(saved.score) == declared["photos (2)_20nn"]


def test_a_new_record_does_not_continue_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1')
    for step in (2, 3):
        with open_to_append(path) as file:
            file.write(Record(step, 0, {"loss": 1.0}).to_line())
    records, num_damaged = read_metrics(path)
    assert ([record.step for record in records], num_damaged) == ([2, 3], 1)
