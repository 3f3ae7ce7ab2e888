"""Records: what a measurement becomes, what a file must hold, and what two of them say."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fp8.testing.diffing import compare
from fp8.testing.records import (
    Record,
    RecordError,
    environment,
    load_record,
    measured,
    numbered,
    save_record,
)

if TYPE_CHECKING:
    from pathlib import Path


def measurement(name: str, value: object, kind: str = "count") -> dict[str, Any]:
    return {"target": "it", "test": "t.py::test[it]", "name": name, "kind": kind, "value": value}


def record(*measurements: dict[str, Any], **environment: str) -> Record:
    return Record(environment, {"it": {"P05": 10}}, measurements)


# ------------------------------------------------------------------------- measurements


def test_a_hash_is_of_the_bits_dtype_and_shape() -> None:
    tensor = torch.tensor([[1.0, -0.0], [448.0, 2.0]])
    codes = tensor.to(torch.float8_e4m3fn)
    hashes = [
        measured(data, "hash")
        for data in (
            tensor, tensor.reshape(4), tensor.to(torch.bfloat16), codes, codes.view(torch.uint8),
            tensor.abs(), [tensor], [tensor, tensor], b"", b"x", None,
        )
    ]  # fmt: skip
    assert len(set(hashes)) == len(hashes)
    assert str(hashes[3]).startswith("float8_e4m3fn[2, 2] sha256:")
    assert measured(tensor.numpy(), "hash") == hashes[0]
    assert measured(tensor.t().contiguous().t(), "hash") == hashes[0]


def test_nans_of_a_format_hash_alike() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        one, other = (torch.tensor([x, 1.0], dtype=dtype) for x in (math.nan, -math.nan))
        assert measured(one, "hash") == measured(other, "hash")
    codes = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert measured(codes[:1], "hash") == measured(codes[1:], "hash")
    assert codes.view(torch.uint8).tolist() == [0x7F, 0xFF]  # the tensor itself was left alone


@pytest.mark.parametrize(
    ("value", "kind", "json_value"),
    [
        (28.5, "sqnr", 28.5),
        (math.inf, "sqnr", "inf"),
        (math.nan, "sqnr", "nan"),
        (np.float64(3.0), "sqnr", 3.0),
        (1024, "bytes", 1024),
        (0, "count", 0),
        ("fp8::scaled_mm", "text", "fp8::scaled_mm"),
    ],
)
def test_values(value: object, kind: str, json_value: object) -> None:
    made = measured(value, kind)
    assert made == json_value
    json.dumps(made, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "kind", "error"),
    [
        (1, "length", ValueError),
        (1.5, "count", TypeError),
        (True, "bytes", TypeError),
        (1, "text", TypeError),
        ("much", "sqnr", ValueError),
    ],
)
def test_wrong_values_are_refused(value: object, kind: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        measured(value, kind)


def test_measurements_of_one_name_are_numbered() -> None:
    made = [measurement("y", 3), measurement("x", 1), measurement("y", 1), measurement("y", 3)]
    assert [(m["name"], m["value"]) for m in numbered(made)] == [
        ("y", 3), ("x", 1), ("y #2", 1), ("y #3", 3),
    ]  # fmt: skip


def test_environment() -> None:
    found = environment()
    assert {"python", "cpu", "machine", "torch", "torch git", "numpy", "ml_dtypes"} <= found.keys()
    assert found["torch"] == torch.__version__
    assert all(isinstance(value, str) and value for value in found.values())


# ---------------------------------------------------------------------------- the file


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "record.json"
    whole = record(measurement("y", 3), measurement("s", "inf", "sqnr"), torch="2.13.0")
    save_record(path, whole)
    assert load_record(path) == whole
    first = path.read_bytes()
    save_record(path, load_record(path))
    assert path.read_bytes() == first


def _damaged(**changes: object) -> str:
    good = {
        "schema": 1,
        "environment": {},
        "laws": {},
        "measurements": [measurement("y", 3)],
    }
    return json.dumps({key: v for key, v in (good | changes).items() if v != "absent"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "record.json: "),
        ("[]", "a record has schema 1, got 'list'"),
        (_damaged(schema=2), "a record has schema 1, got 2"),
        (_damaged(measurements=[]), "holds no measurement, so there is nothing to compare"),
        (_damaged(measurements="absent"), "damaged: KeyError: 'measurements'"),
        (_damaged(laws="absent"), "damaged: KeyError: 'laws'"),
        (_damaged(environment=[]), "damaged: AttributeError"),
        (_damaged(measurements=[{"target": "it"}]), "damaged: KeyError: 'test'"),
        (_damaged(measurements=[3]), "damaged: TypeError"),
        (_damaged(measurements=[measurement("y", 3, "length")]), "damaged: ValueError: kind 'len"),
        (_damaged(measurements=[measurement("y", "?", "sqnr")]), "damaged: ValueError"),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=message):
        load_record(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        load_record(tmp_path / "none.json")


# ------------------------------------------------------------------------- comparing two


def test_the_same_is_the_same() -> None:
    one = record(measurement("y", 3), measurement("s", 28.5, "sqnr"), torch="2.13.0")
    difference = compare(one, one)
    assert difference.same
    assert difference.unchanged == 2
    assert difference.environment == ()


@pytest.mark.parametrize(
    ("kind", "old", "new", "same"),
    [
        ("sqnr", 28.5, 28.5099, True),
        ("sqnr", 28.5, 28.4901, True),
        ("sqnr", 28.5, 28.52, False),
        ("sqnr", 28.5, 28.48, False),  # better is a change, too
        ("sqnr", "inf", "inf", True),
        ("sqnr", "inf", 28.5, False),
        ("sqnr", "inf", "-inf", False),
        ("sqnr", "nan", "nan", True),
        ("sqnr", "nan", 28.5, False),
        ("hash", "a", "b", False),
        ("bytes", 1024, 1025, False),
        ("count", 3, 2, False),
        ("text", "fast", "precise", False),
    ],
)
def test_exact_things_exactly_and_sqnr_within_its_tolerance(
    kind: str, old: object, new: object, same: bool
) -> None:
    difference = compare(record(measurement("y", old, kind)), record(measurement("y", new, kind)))
    assert difference.same is same
    assert len(difference.changed) == (not same)


def test_another_kind_is_a_change() -> None:
    difference = compare(record(measurement("y", 3, "count")), record(measurement("y", 3, "bytes")))
    assert [change.kind for change in difference.changed] == ["count → bytes"]


def test_missing_fails_and_new_does_not() -> None:
    small = record(measurement("y", 3))
    large = record(measurement("y", 3), measurement("z", 4))
    key = ("it", "t.py::test[it]", "z")
    assert compare(small, large).same
    assert compare(small, large).added == (key,)
    assert not compare(large, small).same
    assert compare(large, small).missing == (key,)


def test_a_law_that_is_no_longer_checked_fails() -> None:
    one = measurement("y", 3)
    old = Record({}, {"it": {"P05": 10, "P08": 3, "P24": 0}}, (one,))
    new = Record({}, {"it": {"P05": 1, "P08": 0}}, (one,))
    assert compare(old, new).unchecked == (("it", "P08"),)
    assert not compare(old, new).same
    assert compare(new, old).same


def test_the_environment_is_told_and_not_judged() -> None:
    old = record(measurement("y", 3), torch="2.12.0", gpu="H100")
    new = record(measurement("y", 3), torch="2.13.0", cpu="x")
    difference = compare(old, new)
    assert difference.same
    assert [(e.name, e.old, e.new) for e in difference.environment] == [
        ("torch", "2.12.0", "2.13.0"), ("gpu", "H100", None), ("cpu", None, "x"),
    ]  # fmt: skip
