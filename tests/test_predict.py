"""``pseudograd predict``: its output, the columns it keeps, and the error it prints."""

from __future__ import annotations

import csv
import io
import shlex
import shutil
from pathlib import Path

import pytest

from pseudograd.cli import main
from pseudograd.data import Encoder
from pseudograd.search import Study

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = shlex.split(
    "--hidden 8 --k 1 --learning-rates 0.03 --repetitions 5 --epochs 30 --batch-size 8 --out run"
)


def patients(rows: int = 60) -> list[str]:
    """Return rows of a table with an id, which training leaves out; three quarters are well."""
    lines = ["id,age,blood,state"]
    for at in range(rows):
        ill = at % 4 == 0
        lines.append(
            f"P{at:03},{(70 if ill else 30) + at % 9},{'AB0'[at % 3]},{'ill' * ill or 'well'}"
        )
    return lines


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("patients")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("patients.csv").write_text("\n".join(patients()) + "\n")
        assert main(["tune", "patients.csv", "--target", "state", *OPTIONS]) == 0
    return folder / "run"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "run")


def predicted(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[list[dict[str, str]], str]:
    capsys.readouterr()
    assert main(["predict", "run", *arguments]) == 0
    captured = capsys.readouterr()
    return list(csv.DictReader(io.StringIO(captured.out))), captured.err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["predict", "run", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_kept_columns_are_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    Path("new.csv").write_text(
        'id,age,blood,ward,note\n007,71,A,1.0,"a, b"\n008,1234567.25,0,NA,\nnull,30,B,2.50,x\n'
    )
    rows, _ = predicted(capsys, "new.csv", "--keep", "note", "id", "--keep", "ward", "age")
    assert list(rows[0]) == ["note", "id", "ward", "age", "state", "p(ill)", "p(well)"]
    assert [row["id"] for row in rows] == ["007", "008", "null"]
    assert [row["note"] for row in rows] == ["a, b", "", "x"]
    assert [row["ward"] for row in rows] == ["1.0", "NA", "2.50"]
    assert [row["age"] for row in rows] == ["71", "1234567.25", "30"]
    plain, _ = predicted(capsys, "new.csv")
    assert [row["p(ill)"] for row in plain] == [row["p(ill)"] for row in rows]


def test_columns_of_a_typed_table_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    frame = pandas.DataFrame({"id": [10, 11], "age": [71.123456789, None], "blood": ["A", "B"]})
    frame.to_parquet("new.parquet")
    rows, _ = predicted(capsys, "new.parquet", "--keep", "age", "id")
    assert [(row["age"], row["id"]) for row in rows] == [("71.123456789", "10"), ("", "11")]


def test_columns_that_cannot_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("new.csv").write_text("id,age,blood\n007,71,A\n")
    said = refused(capsys, "new.csv", "--keep", "di")
    assert said == "pseudograd: --keep names 'di': new.csv has 'id', 'age', 'blood'\n"
    said = refused(capsys, "new.csv", "--keep", "id", "state")
    assert said == "pseudograd: --keep names 'state', a column of the predictions: leave it out\n"


def test_the_error_is_printed_if_there_are_labels(capsys: pytest.CaptureFixture[str]) -> None:
    head = "age,blood,state\n"
    Path("new.csv").write_text(head + "75,A,ill\n30,A,ill\n30,A,well\n31,A,well\n32,B,\n33,B,?\n")
    rows, err = predicted(capsys, "new.csv")
    assert [row["state"] for row in rows] == ["ill", "well", "well", "well", "well", "well"]
    assert err == "error 25.00% (1 of 4 rows with a label)\n"
    # One class has twice as many rows as the other.
    Path("new.csv").write_text(head + "30,A,ill\n30,A,well\n31,A,well\n")
    _, err = predicted(capsys, "new.csv")
    assert err == "error 33.33% (1 of 3 rows with a label), balanced error 50.00%\n"
    Path("new.csv").write_text(head + "30,A,\n31,A,\n")
    assert predicted(capsys, "new.csv")[1] == ""
    Path("new.csv").write_text("age,blood\n30,A\n")
    assert predicted(capsys, "new.csv")[1] == ""


def test_the_error_on_training_examples_is_named_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("patients.csv").write_text("\n".join(patients()) + "\n")
    train_size = Study.open("run").data["train_size"]
    assert predicted(capsys, "patients.csv")[1].splitlines()[1] == (
        f"by name and size, this is the data of the search: the model was trained on {train_size} "
        "of these examples, so the error on new ones may be higher"
    )


def test_labels_that_training_did_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    Path("new.csv").write_text("age,blood,state\n75,A,ill\n30,A,dead\n30,A,well\n31,A,dead\n")
    rows, err = predicted(capsys, "new.csv")
    assert len(rows) == 4
    assert err.splitlines() == [
        "target 'state' has labels that were never seen in training, 'dead'; they count as errors",
        "error 50.00% (2 of 4 rows with a label), balanced error 33.33%",
    ]


def test_rows_without_labels_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    quantities = [at / 4 for at in range(30)]
    frame = pandas.DataFrame({"age": 30.0, "blood": ["A", "B"] * 15, "state": quantities})
    frame.to_parquet("new.parquet")
    rows, err = predicted(capsys, "new.parquet")
    assert len(rows) == 30
    assert err.startswith("no error is computed: target 'state' must hold classes")


def test_rows_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "id,age,blood,state\n7,71,A,ill\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    rows, err = predicted(capsys, "-", "--keep", "id")
    assert [(row["id"], row["state"]) for row in rows] == [("7", "ill")]
    assert err == "error 0.00% (0 of 1 row with a label)\n"


def test_a_file_is_written_whole_or_not_at_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("new.csv").write_text("age,blood\n71,A\n")
    assert main(["predict", "run", "new.csv", "--out", "labels.csv"]) == 0
    before = Path("labels.csv").read_bytes()
    assert before.startswith(b"state,p(ill),p(well)\nill,")

    with monkeypatch.context() as patch:

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("pseudograd.files.os.fsync", full)
        Path("new.csv").write_text("age,blood\n30,A\n")
        said = refused(capsys, "new.csv", "--out", "labels.csv")
    assert "labels.csv cannot be written (no space left on device)" in said
    assert Path("labels.csv").read_bytes() == before
    assert not list(Path().glob("*.part"))

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "transform", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["predict", "run", "new.csv", "--out", "labels.csv"])
    assert Path("labels.csv").read_bytes() == before


def test_devices_are_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    """A device must not be replaced by a file."""
    Path("new.csv").write_text("age,blood\n71,A\n")
    Path("sink").symlink_to("/dev/null")
    assert main(["predict", "run", "new.csv", "--out", "sink"]) == 0
    assert Path("sink").is_symlink()
    assert Path("/dev/null").is_char_device()
