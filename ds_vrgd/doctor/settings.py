"""Turn a user's JSON into one that runs here: batch sizes for the ranks that there are, "auto" values, no monitors."""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime import lr_schedules

from ds_vrgd.doctor.report import Row
from ds_vrgd.engines.deepspeed.configs import OPEN, SIZES, did_you_mean, faults_of, unknown_keys
from ds_vrgd.engines.deepspeed.register import NAMES

# More micro-batches per step prove nothing more; a run for a thousand GPUs may ask for thousands of them on two.
MOST_MICRO_BATCHES = 64
# The sizes that the JSON leaves to the program. Two micro-batches, so that moments are merged over them, too.
MICRO_BATCHES, SAMPLES = 2, 4

# They write files or talk to servers, and change no number.
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler")

#: Sections that must be objects where they are given.
SECTIONS = {
    *OPEN, *MONITORS, "zero_optimization", "fp16", "bf16", "compile", "tensor_parallel", "hybrid_engine",
}  # fmt: skip

#: The nearest of our optimizers to one of DeepSpeed's or torch's.
NEAREST = {
    "adam": "VRAdam", "adamw": "VRAdamW", "onebitadam": "VRAdam", "zerooneadam": "VRAdam", "sgd": "VRMomentum",
    "onebitlamb": "VRLAMB",
}  # fmt: skip


@dataclass
class Settings:
    """The configuration that the doctor gives DeepSpeed."""

    optimizer: str  # the name of its class
    arguments: dict[str, Any]  # the optimizer's, as the JSON gives them
    config: dict[str, Any]  # complete
    changes: list[str]  # each value that is not the JSON's own, and why
    warnings: list[str]  # keys that DeepSpeed ignores

    def rows(self) -> list[Row]:
        """Return the table's rows of the optimizer, of what was changed and of what is ignored."""
        given = ", ".join([self.optimizer, *(f"{name}={value}" for name, value in self.arguments.items())])
        changed = [("changed here", change) for change in self.changes]
        return [("optimizer", given), *changed, *(("warning", text) for text in self.warnings)]


def prepare(config: dict[str, Any], world: int, device: str) -> Settings:
    """Return the settings for ``world`` ranks, given a JSON, on a device by DeepSpeed's name ("cpu" without one).

    Raises:
        ValueError: DeepSpeed would refuse the JSON or ignore a misspelt key, the optimizer is not one of ours, a step
            would see a single chunk, or the model would be cut.
    """
    _check_sections(config)
    _check_optimizer(config)
    size = (config.get("tensor_parallel") or {}).get("autotp_size", 0)
    if isinstance(size, int) and size > 1:
        raise ValueError(
            f"tensor_parallel.autotp_size={size}: the doctor compares every rank with a whole model, and cannot check "
            "tensor parallelism. Give it the JSON without that section; the rest of it is checked all the same"
        )
    warnings, changes, config = _check_keys(config), [], copy.deepcopy(config)
    optimizer, arguments = NAMES[config["optimizer"]["type"]], config["optimizer"].setdefault("params", {})
    for name in MONITORS:
        if config.pop(name, None):
            changes.append(f"{name}: left out here")
    if '"auto"' in json.dumps(config.get("scheduler")):
        del config["scheduler"]
        changes.append('scheduler: has "auto" values, left out here; the learning rate is constant')
    _set_batch_sizes(config, world, changes)
    _resolve(config, {"bf16.enabled": device != "cpu", "fp16.enabled": False, "gradient_clipping": 1.0}, changes)
    config["steps_per_print"] = 10**9
    micro_batches = config["gradient_accumulation_steps"]
    if optimizer.reduces_variance and arguments.get("gamma") != 1.0 and world * micro_batches < 2:
        raise ValueError(
            f"gradient_accumulation_steps={micro_batches} on {world} rank is k = 1 chunk, which has no variance. Give "
            "the doctor --world 2, or raise gradient_accumulation_steps, or set gamma=1.0 in optimizer.params"
        )
    return Settings(optimizer.__name__, arguments, config, changes, warnings)


def _check_sections(config: dict[str, Any]) -> None:
    """Raise ValueError unless every section is an object."""
    sections = {name: config.get(name, {}) for name in sorted(SECTIONS)}
    for name in ("optimizer", "scheduler"):
        sections[f"{name}.params"] = sections[name].get("params", {}) if isinstance(sections[name], dict) else {}
    for name, value in sections.items():
        if not isinstance(value, dict) and not (name == "zero_optimization" and isinstance(value, bool)):
            raise ValueError(f"{name}={value!r}: DeepSpeed needs an object, {{...}}. Write one, or leave it out")


def _check_keys(config: dict[str, Any]) -> list[str]:
    """Return a warning for each key that DeepSpeed ignores.

    Raises:
        ValueError: a key is a misspelt one of DeepSpeed's, or DeepSpeed would refuse a value.
    """
    config = copy.deepcopy(config)
    _resolve(config, {}, [])  # "auto" becomes a default
    unknown = unknown_keys(config)
    faults = [text for text, is_slip in unknown.items() if is_slip]
    faults += _faults_of_schedule(config.get("scheduler", {}))
    if all(config.get(name, {}).get("enabled") is True for name in ("fp16", "bf16")):
        faults.append("fp16.enabled=true and bf16.enabled=true: set one of them to false")
    if faults := faults + faults_of(config, together=not faults):
        listed = "".join(f"\n  - {fault}" for fault in faults)
        raise ValueError(faults[0] if len(faults) == 1 else f"the configuration has {len(faults)} faults:{listed}")
    return list(unknown)


def _faults_of_schedule(section: dict[str, Any]) -> list[str]:
    name = section.get("type")
    if name is None:
        return []
    kind = getattr(lr_schedules, str(name), None) or getattr(torch.optim.lr_scheduler, str(name), None)
    if kind is None:
        known = lr_schedules.VALID_LR_SCHEDULES
        others = [each for each in dir(torch.optim.lr_scheduler) if each.endswith("LR")]
        guess = did_you_mean(str(name), [*known, *others]) or f"; give one of {', '.join(known)}"
        return [f'scheduler.type="{name}" is a schedule neither of DeepSpeed nor of torch{guess}']
    arguments = set(inspect.signature(kind).parameters) - {"optimizer"}
    has = f"; it has {', '.join(sorted(arguments))}"
    return [
        f"scheduler.params.{key}: {name} has no such argument{did_you_mean(key, arguments) or has}"
        for key in sorted(section.get("params", {}).keys() - arguments)
    ]


def _check_optimizer(config: dict[str, Any]) -> None:
    """Raise ValueError unless the optimizer is one of ours; the message says how to switch."""
    name = config.get("optimizer", {}).get("type")
    if isinstance(name, str) and name in NAMES:
        return
    if name is None:
        raise ValueError(
            'the JSON names no optimizer, so there is nothing to check: add "optimizer": {"type": "VRLAMB", "params": '
            '{"lr": 4e-3}}, with the arguments that your program gives'
        )
    near = (NEAREST | {ours.lower(): ours for ours in NAMES}).get(str(name).lower())
    way_out = f'set it to "{near}"' if near else "set it to the nearest of ours"
    raise ValueError(
        f'optimizer.type="{name}" is not an optimizer of ds_vrgd, so there is nothing to check; {way_out} '
        f"({', '.join(name for name in NAMES if '-' not in name)})"
    )


def _set_batch_sizes(config: dict[str, Any], world: int, changes: list[str]) -> None:
    """Keep the JSON's micro-batch and accumulation where they are numbers; the global batch follows from them.

    Raises:
        ValueError: a size is not a whole number, or no number of ranks can train with the batch.
    """
    given = {key: config.get(key) for key in SIZES}
    for key, value in given.items():
        if value not in (None, "auto") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f'{key}={value!r}: give a whole number from 1 on, or "auto"')
    batch, samples, micro_batches = (value if isinstance(value, int) else None for value in given.values())
    if batch is not None and batch % ((samples or 1) * (micro_batches or 1)):
        factors = " x ".join(f"{key}={given[key]}" for key in SIZES[1:] if isinstance(given[key], int))
        raise ValueError(
            f"train_batch_size={batch} is no multiple of {factors}, so no number of ranks can train with it: it must "
            "be micro-batch x accumulation x ranks. Change one of them, or leave train_batch_size out"
        )

    def rest(of_one: int, otherwise: int) -> int:
        return batch // of_one if batch is not None and batch % of_one == 0 else otherwise

    micro_batches = min(micro_batches or rest(world * (samples or SAMPLES), MICRO_BATCHES), MOST_MICRO_BATCHES)
    samples = samples or rest(world * micro_batches, SAMPLES)
    for key, value in zip(SIZES, (world * samples * micro_batches, samples, micro_batches), strict=True):
        if given[key] != value:
            changes.append(f"{key}: {given[key] or 'not given'} -> {value}, for {world} rank{'s' * (world > 1)}")
        config[key] = value


def _resolve(section: dict[str, Any], values: dict[str, Any], changes: list[str], path: str = "") -> None:
    """Replace "auto": by the value for its path, else by DeepSpeed's or the optimizer's own default."""
    for key, value in list(section.items()):
        here = f"{path}{key}"
        if isinstance(value, dict):
            _resolve(value, values, changes, f"{here}.")
        elif value == "auto":
            del section[key]
            section |= {key: values[here]} if here in values else {}
            changes.append(f"{here}: auto -> {json.dumps(values[here]) if here in values else 'the default'}")
