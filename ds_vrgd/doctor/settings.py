"""From a user's JSON to one that runs here: batch sizes for the ranks that there are, "auto" values, no monitors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from ds_vrgd.zero.register import NAMES

# More micro-batches a step prove nothing more, and a run for a thousand GPUs may ask for thousands of them on two.
MOST_MICRO_BATCHES = 64
# Where the JSON leaves them to the program: two, so that moments are merged over micro-batches, too.
MICRO_BATCHES = 2
SAMPLES = 4

# They write files or talk to servers, and change no number.
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler")

#: Of ours, the nearest to an optimizer of DeepSpeed's or torch's.
NEAREST = {
    "adam": "VRAdam", "adamw": "VRAdamW", "onebitadam": "VRAdam", "zerooneadam": "VRAdam", "sgd": "VRMomentum",
    "lamb": "VRLAMB", "onebitlamb": "VRLAMB", "lars": "VRLARS",
}  # fmt: skip


@dataclass
class Settings:
    """What the doctor gives DeepSpeed.

    Attributes:
        config: DeepSpeed's configuration, complete.
        changes: each value that is not the JSON's own, and why.
    """

    config: dict[str, Any]
    changes: list[str] = field(default_factory=list)

    @property
    def optimizer(self) -> str:
        """The optimizer's class name."""
        return NAMES[self.config["optimizer"]["type"]].__name__

    @property
    def arguments(self) -> dict[str, Any]:
        """The optimizer's, as the JSON gives them."""
        given: dict[str, Any] = self.config["optimizer"]["params"]
        return given

    @property
    def reduces_variance(self) -> bool:
        """Whether GSNR is on."""
        return NAMES[self.config["optimizer"]["type"]].reduces_variance and self.arguments.get("gamma", 0.1) != 1.0


def prepare(config: dict[str, Any], world: int, device: str) -> Settings:
    """Settings for ``world`` ranks.

    Args:
        config: the JSON, not changed.
        world: data-parallel ranks.
        device: DeepSpeed's name of the accelerator, "cpu" without one.

    Raises:
        ValueError: the optimizer is none of ours, a step would see a single chunk, or the model would be cut.
    """
    check_optimizer(config)
    _refuse_tensor_parallel(config)
    settings = Settings(copy.deepcopy(config))
    config, changes = settings.config, settings.changes
    config["optimizer"].setdefault("params", {})
    for name in MONITORS:
        if config.pop(name, None):
            changes.append(f"{name}: left out here")
    if "auto" in _leaves(config.get("scheduler")):
        del config["scheduler"]
        changes.append('scheduler: has "auto" values, left out here; the learning rate is constant')
    _set_batch_sizes(config, world, changes)
    _resolve(config, {"bf16.enabled": device != "cpu", "fp16.enabled": False, "gradient_clipping": 1.0}, changes)
    config["steps_per_print"] = 10**9
    micro_batches = config["gradient_accumulation_steps"]
    if settings.reduces_variance and world * micro_batches < 2:
        raise ValueError(
            f"gradient_accumulation_steps={micro_batches} on {world} rank is k = 1 chunk, which has no variance. Give "
            "the doctor --world 2, or raise gradient_accumulation_steps, or set gamma=1.0 in optimizer.params"
        )
    return settings


def check_optimizer(config: dict[str, Any]) -> None:
    """Whether there is anything to check.

    Raises:
        ValueError: no optimizer, or none of ours; says how to switch.
    """
    section = config.get("optimizer")
    name = section.get("type") if isinstance(section, dict) else None
    if name in NAMES:
        return
    if name is None:
        raise ValueError(
            'the JSON names no optimizer, so there is nothing to check; add "optimizer": {"type": "VRLAMB", "params": '
            '{"lr": 4e-3}}, with the arguments that your program gives'
        )
    same = [ours for ours in NAMES if ours.lower() == str(name).lower()]
    nearest = same[0] if same else NEAREST.get(str(name).lower())
    way_out = f'set it to "{nearest}"' if nearest else "set it to the nearest of ours"
    raise ValueError(
        f'optimizer.type="{name}" is not an optimizer of ds_vrgd, so there is nothing to check; {way_out} '
        f"({', '.join(name for name in NAMES if '-' not in name)}), and import ds_vrgd in your program"
    )


def _refuse_tensor_parallel(config: dict[str, Any]) -> None:
    size = (config.get("tensor_parallel") or {}).get("autotp_size", 0)
    if isinstance(size, int) and size > 1:
        raise ValueError(
            f"tensor_parallel.autotp_size={size}: the doctor holds every rank against a whole model, and cannot check "
            "tensor parallelism. Give it the JSON without that section; the rest of it is checked all the same"
        )


def _set_batch_sizes(config: dict[str, Any], world: int, changes: list[str]) -> None:
    """Keep the JSON's micro-batch and accumulation where they are numbers; the global batch follows."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {key: config.get(key) for key in keys}
    batch, samples, micro_batches = (value if isinstance(value, int) else None for value in given.values())
    if micro_batches is None:
        of_one = world * (samples or SAMPLES)
        micro_batches = batch // of_one if batch is not None and batch % of_one == 0 else MICRO_BATCHES
    micro_batches = min(micro_batches, MOST_MICRO_BATCHES)
    if samples is None:
        of_one = world * micro_batches
        samples = batch // of_one if batch is not None and batch % of_one == 0 else SAMPLES
    for key, value in zip(keys, (world * samples * micro_batches, samples, micro_batches), strict=True):
        if given[key] != value:
            changes.append(f"{key}: {_shown(given[key])} -> {value}, for {world} ranks")
        config[key] = value


def _resolve(section: dict[str, Any], values: dict[str, Any], changes: list[str], path: str = "") -> None:
    """Replace "auto": by the value for its path, else by DeepSpeed's or the optimizer's own default."""
    for key, value in list(section.items()):
        here = f"{path}{key}"
        if isinstance(value, dict):
            _resolve(value, values, changes, f"{here}.")
        elif value == "auto" and here in values:
            section[key] = values[here]
            changes.append(f"{here}: auto -> {_shown(values[here])}")
        elif value == "auto":
            del section[key]
            changes.append(f"{here}: auto -> the default")


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    return [value]
