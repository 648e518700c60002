"""JSON of others: either the typed content, or one UserError that names file and field."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from pipeline.base import json_record
from pipeline.base.errors import UserError


@dataclass(frozen=True)
class Inner:
    x: int


@dataclass(frozen=True)
class Record:
    step: int
    rate: float
    kind: Literal["a", "b"]
    size: tuple[int, int] = (1, 1)
    names: list[str] = field(default_factory=list)
    inner: Inner | None = None
    by_name: dict[str, Inner] = field(default_factory=dict)
    label: int | str = 0
    free: Any = None


GOOD: dict[str, Any] = {
    "step": 3,
    "rate": 1,
    "kind": "a",
    "size": [2, 3],
    "names": ["p", "q"],
    "inner": {"x": 1, "unknown": 5},
    "by_name": {"k": {"x": 2}},
    "label": "seven",
    "free": [None],
}


def test_whole_record() -> None:
    record = json_record.parse(json.dumps(GOOD), Record, "f.json")
    assert record == Record(3, 1.0, "a", (2, 3), ["p", "q"], Inner(1), {"k": Inner(2)}, "seven", [None])
    assert type(record.rate) is float
    assert json_record.parse('{"step": 1, "rate": 0.5, "kind": "b"}', Record, "f.json") == Record(1, 0.5, "b")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": True}, "step = True"),
        ({"step": 2.0}, "step = 2.0"),
        ({"step": "2"}, "step = '2'"),
        ({"rate": 10**400}, "rate = 1000"),
        ({"kind": "c"}, "kind = 'c'"),
        ({"kind": ["a"]}, "kind = ['a']"),
        ({"size": [1]}, "size = [1]"),
        ({"size": [1, "x"]}, "size[1] = 'x'"),
        ({"names": ["p", 7]}, "names[1] = 7"),
        ({"names": "pq"}, "names = 'pq'"),
        ({"inner": {"x": None}}, "inner.x = None"),
        ({"inner": {}}, "inner.x is missing"),
        ({"by_name": {"k": {"x": []}}}, "by_name.k.x = []"),
        ({"by_name": []}, "by_name = []"),
        ({"label": 1.5}, "label = 1.5"),
    ],
)
def test_wrong_field(change: dict, says: str) -> None:
    with pytest.raises(UserError) as caught:
        json_record.parse(json.dumps(GOOD | change), Record, "f.json")
    assert str(caught.value).startswith("f.json: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b"NaN", b'{"x": Infinity}'],
)
def test_no_json(text: bytes) -> None:
    with pytest.raises(UserError, match=r"^f.json is not valid JSON") as caught:
        json_record.parse(text, Any, "f.json")
    assert len(str(caught.value)) < 300


def test_long_values_are_cut() -> None:
    with pytest.raises(UserError) as caught:
        json_record.parse(json.dumps(GOOD | {"step": "s" * 100_000}), Record, "f.json")
    assert len(str(caught.value)) < 300


def test_files(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"x": 4}')
    assert json_record.read(tmp_path / "x.json", Inner) == Inner(4)
    with pytest.raises(FileNotFoundError):
        json_record.read(tmp_path / "none.json", Inner)
    with pytest.raises(FileNotFoundError):
        json_record.read(tmp_path / "x.json" / "y.json", Inner)
    with pytest.raises(UserError, match="is a folder"):
        json_record.read(tmp_path, Inner)


def test_what_is_no_number_can_be_read_again() -> None:
    scores = {
        "top1": 0.5,
        "loss": math.nan,
        "fewshot": [{"top1": math.inf, "shots": 5}],
        "name": "nan",
        "std": None,
        "ok": True,
    }
    expected = {**scores, "loss": None, "fewshot": [{"top1": None, "shots": 5}]}
    assert json_record.parse(json.dumps(json_record.without_nan(scores)), dict, "scores.json") == expected
