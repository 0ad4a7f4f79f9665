"""The tables and the figure of ``evidence.ranks_blind``: what was reported, of whom, as what, and how soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.pages import table
from evidence.experiment import Row
from evidence.report import grouped, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS = {"fsdp2": "processes, FSDP2", "replicas": "in one process"}
WITH_LAYER = ("scaled", "zero", "flipped", "element", "nonfinite")
SIZES = {"fewer than 64 elements": (0, 64), "64 to 1,023": (64, 1024), "1,024 and more": (1024, 10**9)}
#: Of a flipped bit.
CHANGES = ("below 0.1", "0.1 to 1", "1 to 10", "10 and more")
LIMITS = (0.1, 1.0, 10.0)
FLIP = "one exponent bit flipped"


def tables(rows: Sequence[Row]) -> list[str]:
    """Faults; trainings; sizes of layers; bits; every fault that was not reported, or reported wrongly."""
    faults = [fault for row in rows for fault in row["trainings"] if "name" in fault]
    return [
        "The fault that was put in, once in each training:",
        "",
        *_table("fault", {f"{name} ({_classes(of)})": of for (name,), of in sorted(grouped(faults, "name").items())}),
        "The same faults by training, and the steps before them:",
        "",
        *_by_training(rows),
        "Faults in one layer, by the layer's size; flipped bits are below:",
        "",
        *_table("layer", _by_size(fault for fault in faults if _has_layer(fault) and fault["name"] != FLIP)),
        "Flipped bits, by the change in norms of the layer's gradient:",
        "",
        *_of_bits([fault for fault in faults if fault["name"] == FLIP]),
        "Not reported, or reported of another rank:",
        "",
        *_misses(rows),
    ]


def of_the_rank(fault: Row) -> bool:
    """Return whether all that was reported names the faulty rank; of two with the same batch, both."""
    both = {fault["rank"], fault["other"]} if fault["expected"] == "identical" else {fault["rank"]}
    return bool(fault["events"]) and all({event["rank"], *event["peers"]} == both for event in fault["events"])


def of_the_class(fault: Row) -> bool:
    """Return whether the first event has the fault's class."""
    return bool(fault["events"]) and fault["events"][0]["fault"] == fault["expected"]


def of_the_layer(fault: Row) -> bool:
    """Return whether the first event has the faulty layer as its clearest."""
    return bool(fault["events"]) and fault["events"][0]["layers"][:1] == [fault["layer"]]


def _has_layer(fault: Row) -> bool:
    return fault["expected"] in WITH_LAYER


def _classes(faults: Iterable[Row]) -> str:
    return " or ".join(sorted({fault["expected"] for fault in faults}))


def _table(first: str, groups: dict[str, list[Row]]) -> list[str]:
    header = [
        first,
        "trainings",
        "reported",
        "right rank",
        "right class",
        "right layer",
        "steps to the right rank",
        "reported as",
    ]
    return table(header, [[name, *_cells(of)] for name, of in groups.items()])


def _cells(faults: Sequence[Row]) -> list[str]:
    steps = [fault["steps"] for fault in faults if of_the_rank(fault)]
    return [
        str(len(faults)),
        _share(faults, lambda fault: bool(fault["events"])),
        _share(faults, of_the_rank),
        _share(faults, of_the_class),
        _share([fault for fault in faults if _has_layer(fault)], of_the_layer),
        spread(steps, 0) if steps else "–",
        _counts(fault["events"][0] for fault in faults if fault["events"]),
    ]


def _counts(events: Iterable[Row]) -> str:
    classes = Counter(event["fault"] for event in events)
    return ", ".join(f"{name} {count}" for name, count in classes.most_common()) or "–"


def _share(faults: Sequence[Row], holds: Callable[[Row], bool]) -> str:
    return f"{sum(map(holds, faults))} of {len(faults)}" if faults else "–"


def _by_training(rows: Sequence[Row]) -> list[str]:
    body = []
    for (ranks, model, k), of in grouped(rows, "ranks", "model", "k").items():
        trainings = [training for row in of for training in row["trainings"]]
        alarms = [event for training in trainings for event in training["alarms"]]
        losses = [training["losses"] for training in trainings if "name" not in training]
        body.append(
            [
                f"{model}, {k} ranks, {RANKS[ranks]}",
                *_cells([training for training in trainings if "name" in training])[:5],
                f"{sum(training['clean_steps'] for training in trainings):,}",
                str(len(alarms)),
                _counts(alarms),
                f"{spread([first for first, _ in losses], 2)} to {spread([last for _, last in losses], 2)}",
            ]
        )
    header = ["training", "faults", "reported", "right rank", "right class", "right layer"]
    return table([*header, "clean steps", "false alarms", "as", "loss of the clean training"], body)


def _by_size(faults: Iterable[Row]) -> dict[str, list[Row]]:
    found = list(faults)
    sizes = {name: [each for each in found if low <= each["numel"] < high] for name, (low, high) in SIZES.items()}
    return {name: of for name, of in sizes.items() if of}


def _of_bits(faults: Sequence[Row]) -> list[str]:
    groups: dict[str, list[Row]] = {}
    for fault in sorted(faults, key=lambda fault: (_change(fault), fault["expected"])):
        beyond = "; the value is beyond 2^48" if fault["expected"] == "nonfinite" else ""
        groups.setdefault(CHANGES[_change(fault)] + beyond, []).append(fault)
    header = ["change", "bits", "trainings", "reported", "right rank", "right class", "right layer"]
    bits = {name: ", ".join(map(str, sorted({one["bit"] for one in of}))) for name, of in groups.items()}
    return table(header, [[name, bits[name], *_cells(of)[:5]] for name, of in groups.items()])


def _change(fault: Row) -> int:
    return sum(not fault["size"] < limit for limit in LIMITS)  # NaN is beyond all


def _misses(rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        for fault in row["trainings"]:
            if "name" in fault and not of_the_rank(fault):
                seen = "; ".join(f"rank {event['rank']}: {event['fault']}" for event in fault["events"]) or "nothing"
                where = f"{fault['layer']} ({fault['numel']:,})" if _has_layer(fault) else "–"
                size = f"{fault['size']:.2g}" if "size" in fault else "–"
                training = f"{row['model']}, {row['k']} ranks, {RANKS[row['ranks']]}"
                body.append([fault["name"], training, where, size, str(fault["step"]), str(fault["rank"]), seen])
    header = ["fault", "training", "layer (elements)", "change of a flipped bit", "from step", "rank", "reported"]
    return table(header, sorted(body))


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Draw, for each fault, the share of trainings in which it was reported by then."""
    axis = figure.subplots()
    faults = [fault for row in rows for fault in row["trainings"] if "name" in fault]
    for place, ((name,), of) in enumerate(sorted(grouped(faults, "name").items())):
        steps = range(1, 41)
        shares = [
            sum(fault["steps"] is not None and fault["steps"] <= step for fault in of) / len(of) for step in steps
        ]
        axis.plot(steps, shares, label=name, color=f"C{place}", linestyle="-" if place % 2 else "--")
    axis.set(xlabel="steps with the fault", ylabel="share reported", xscale="log", ylim=(0, 1.05))
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
