"""Files of tables in all formats: compressed, from standard input, in other encodings."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import shlex
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pandas as pd
import pytest

from pseudograd.cli import main
from pseudograd.data import load_table, open_data, read_frame
from pseudograd.data.features import Categories
from pseudograd.data.survey import Note

FRAME = pd.DataFrame(
    {
        "größe": np.arange(40) * 7 % 11 / 2,
        "hue": ["red", "blue", "red", None] * 10,
        "when": pd.date_range("2020-01-30", periods=40),
        "y": ["no", "yes"] * 20,
    }
)


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def text(separator: str = ",") -> bytes:
    content: str = FRAME.to_csv(index=False, sep=separator)
    return content.encode()


def zipped(content: bytes, name: str) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return held.getvalue()


def in_bytes(write: Callable[[io.BytesIO], object]) -> bytes:
    held = io.BytesIO()
    write(held)
    return held.getvalue()


def of_r() -> bytes:
    """Return a table as R's write.table does: spaces, quotes, and row names without a header."""
    rows = FRAME.to_csv(sep=" ", header=False, na_rep="NA", quoting=csv.QUOTE_NONNUMERIC)
    return f'"größe" "hue" "when" "y"\n{rows}'.encode()


def stream(file: Any) -> None:
    """Write Arrow's stream format, as Hugging Face's datasets do."""
    import pyarrow as pa

    table = pa.Table.from_pandas(FRAME)
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


FILES: dict[str, Callable[[], bytes]] = {
    "a.csv": text,
    "a.tsv": lambda: text("\t"),
    "a.txt": lambda: text("|"),
    "r.txt": of_r,
    "b.txt": lambda: text(";").replace(b".", b","),
    "a.csv.gz": lambda: gzip.compress(text()),
    "a.tsv.bz2": lambda: bz2.compress(text("\t")),
    "a.csv.xz": lambda: lzma.compress(text()),
    "a.csv.zip": lambda: zipped(text(), "a.csv"),
    "a.zip": lambda: zipped(text("\t"), "a.tsv"),
    "a.gz": lambda: gzip.compress(text()),
    "a.jsonl": lambda: FRAME.to_json(orient="records", lines=True, date_format="iso").encode(),
    "a.xlsx": lambda: in_bytes(lambda file: FRAME.to_excel(file, index=False)),
    "a.parquet": lambda: in_bytes(FRAME.to_parquet),
    "a.feather": lambda: in_bytes(FRAME.to_feather),
    "a.arrow": lambda: in_bytes(FRAME.to_feather),
    "stream.arrow": lambda: in_bytes(stream),
    "a.parquet.gz": lambda: gzip.compress(in_bytes(FRAME.to_parquet)),
}


def made(name: str) -> bytes:
    if name.endswith(".xlsx"):
        pytest.importorskip("openpyxl", reason="needs openpyxl to read .xlsx")
    if any(kind in name for kind in (".parquet", ".feather", ".arrow")):
        pytest.importorskip("pyarrow", reason="needs pyarrow to read this format")
    return FILES[name]()


def quietly(source: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)
        return load_table(source, "y", **options)


@pytest.mark.parametrize("name", FILES)
def test_all_formats_give_the_same_features(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(name).write_bytes(made(name))
    Path("plain.csv").write_bytes(text())
    expected, encoder = quietly("plain.csv")
    data, found = quietly(name)
    assert data.name == name
    np.testing.assert_array_equal(data.features, expected.features)
    assert found.labels == encoder.labels == ("no", "yes")
    assert [column.name for column in found.columns] == ["größe", "hue", "when"]
    new = encoder.transform(read_frame(name, encoder))
    np.testing.assert_array_equal(new, encoder.transform(FRAME))
    # The same from standard input, if it is text.
    if name.endswith((".csv", ".tsv", ".txt", ".jsonl")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(made(name))))
        data, _ = open_data("-", target="y")
        assert data.name == "stdin"
        np.testing.assert_array_equal(data.features, expected.features)


@pytest.mark.parametrize("kind", ["pandas", "polars", "lazy"])
def test_frames(kind: str) -> None:
    frame: Any = FRAME
    if kind != "pandas":
        polars = pytest.importorskip("polars", reason="polars is not installed")
        pytest.importorskip("pyarrow", reason="polars needs pyarrow to convert")
        frame = polars.from_pandas(FRAME)
        frame = frame.lazy() if kind == "lazy" else frame
    Path("plain.csv").write_bytes(text())
    expected, encoder = quietly("plain.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)
        data, _ = open_data(frame, target="y")
    assert data.name == "frame"
    np.testing.assert_array_equal(data.features, expected.features)
    np.testing.assert_array_equal(
        encoder.transform(read_frame(frame, encoder)), encoder.transform(FRAME)
    )
    with pytest.raises(ValueError, match="must be a path, or a pandas or polars data frame, not"):
        load_table([1, 2], "y")


def test_the_index_of_a_frame_is_no_column() -> None:
    data, encoder = quietly(FRAME.set_index(np.arange(40) * 3 + 5))
    assert [column.name for column in encoder.columns] == ["größe", "hue", "when"]
    assert sorted(data.rows.tolist()) == list(range(1, 41))


def test_only_the_first_sheet_is_read() -> None:
    pytest.importorskip("openpyxl", reason="needs openpyxl to read .xlsx")
    with pd.ExcelWriter("a.xlsx") as book:
        FRAME.to_excel(book, sheet_name="first")
        FRAME.to_excel(book, sheet_name="second")
    with pytest.warns(Note) as told:
        load_table("a.xlsx", "y")
    lines = [str(note.message) for note in told]
    assert "only the first sheet, 'first', is read" in lines
    assert "column 'Unnamed: 0' left out: all entries differ, as ids do" in lines


def test_excel_without_openpyxl(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.xlsx").touch()
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(ImportError, match=r"needs openpyxl: pip install 'pseudograd\[excel\]'"):
        load_table("a.xlsx", "y")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "cp1252"])
def test_encodings(encoding: str) -> None:
    content = FRAME.to_csv(index=False)
    if encoding == "utf-16-be":
        content = "\ufeff" + content
    Path("a.csv").write_bytes(content.encode(encoding))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, encoder = load_table("a.csv", "y")
    assert encoder.columns[0].name == "größe"
    assumed = [str(note.message) for note in told if "1252" in str(note.message)]
    wanted = "a.csv is not UTF-8 and was read as Windows-1252: save it as UTF-8 if letters look"
    assert [line[: len(wanted)] for line in assumed] == [wanted] * (encoding == "cp1252")


def test_blanks_after_separators_are_stripped() -> None:
    Path("a.csv").write_text("x, hue, y\n" + "1, red, <=50K\n2, blue, >50K\n3, ?, <=50K\n" * 8)
    _, encoder = load_table("a.csv", "y")
    assert encoder.labels == ("<=50K", ">50K")
    assert encoder.columns[1] == Categories("hue", ("blue", "red"), missing=True)


def titled(path: str) -> None:
    """Write the table below three other lines, with spaces around the names."""
    frame = FRAME.rename(columns={"hue": " hue", "y": "y "})
    titles = ["Sales, 2020", "", "# exported"]
    if path.endswith(".xlsx"):
        frame.to_excel(path, startrow=3, index=False)
        book = openpyxl.load_workbook(path)
        for row, title in enumerate(titles, 1):
            book.active.cell(row, 1, title or None)
        book.save(path)
    else:
        Path(path).write_text("\n".join([*titles, frame.to_csv(index=False, sep=";")]))


@pytest.mark.parametrize("path", ["report.csv", "report.xlsx"])
def test_titles_above_the_header_are_passed_over(path: str) -> None:
    titled(path)
    with pytest.warns(Note, match="is read from line 4 on, the first that looks like a header"):
        data, encoder = load_table(path, "y")
    Path("plain.csv").write_bytes(text())
    expected, plain = load_table("plain.csv", "y")
    assert data.features.equal(expected.features)
    assert [column.name for column in encoder.columns] == [c.name for c in plain.columns]
    with pytest.warns(Note, match="line 4"):
        assert len(read_frame(path, encoder)) == len(FRAME)


def test_a_short_line_below_titles_is_named() -> None:
    titled("report.csv")
    lines = Path("report.csv").read_text().splitlines()
    Path("report.csv").write_text("\n".join([*lines[:9], "1;2", *lines[9:]]))
    with pytest.raises(ValueError, match="line 10 has 2 fields, the header 4"):
        load_table("report.csv", "y")


def test_half_precision() -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow to read .parquet")
    FRAME[["größe", "y"]].astype({"größe": np.float16}).to_parquet("a.parquet")
    column = quietly("a.parquet")[1].columns[0]
    assert (column.low, column.high) == (0.0, 5.0)
    np.savez("a.npz", X=FRAME[["größe"]].to_numpy(np.float16), y=np.arange(40) % 2)
    assert quietly("a.npz")[1].columns[0].high == 5.0


def test_lists_in_json_are_left_out() -> None:
    FRAME.assign(tags=[[1, 2]] * 40).to_json("a.jsonl", orient="records", lines=True)
    with pytest.warns(Note, match="column 'tags' left out: neither numbers nor texts"):
        load_table("a.jsonl", "y")


# --- archives, and the command line ---------------------------------------------------------------


def test_several_files_in_an_archive_are_refused() -> None:
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.writestr("a.csv", text())
        archive.writestr("b.csv", text())
    with pytest.raises(
        ValueError, match=r"a.zip contains 2 files: make an archive of a single one"
    ):
        load_table("a.zip", "y")


def test_a_damaged_archive() -> None:
    Path("a.csv.gz").write_bytes(gzip.compress(text())[:-20])
    with pytest.raises(ValueError, match=r"a.csv.gz cannot be read as a .gz file \(.*\): save it"):
        load_table("a.csv.gz", "y")


def test_column_options_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From standard input, too."""
    frame = FRAME.assign(patient=np.arange(40) % 13, year=range(1980, 2020), code=[5, -1] * 20)
    content = frame.to_csv(index=False).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    options = shlex.split(
        "--target y --group patient --numbers year --missing -1 u --drop when --hidden 2 --k 1 "
        "--protocol paper --learning-rates 0.1 --repetitions 1 --retrainings 1 --epochs 1 --out run"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["tune", "-", *options]) == 0
    assert "columns read as numbers: 'größe', 'year', 'code'; as categories: 'hue'" in (
        capsys.readouterr().err
    )
    facts = json.loads(Path("run/run.json").read_text("utf-8"))["data"]
    assert facts["name"] == "stdin"
    used = {column["name"]: column["used_as"] for column in facts["notes"]["columns"]}
    assert used == dict.fromkeys(["größe", "year", "code"], "numbers") | {"hue": "categories"}
    encoder = json.loads(Path("run/model.json").read_text("utf-8"))["encoder"]
    assert [column["codes"] for column in encoder["columns"]] == [["-1", "u", -1.0]] * 4
