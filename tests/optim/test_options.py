"""Every wrong argument is refused by name, value and range: in the constructor, in a param group, and later."""

from __future__ import annotations

import inspect
import pydoc
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from ds_vrgd.optim import LAMB, LARS, OPTIMIZERS, VRLAMB, VRSGD, VRAdam, VRMomentum, VROptimizer
from ds_vrgd.optim.options import OPTIONS, WHOLE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "OPTIMIZERS.md"
NAN = float("nan")
# (argument, value, what the message says): one value just outside each end of the range, and what is no number at all.
WRONG: list[tuple[str, Any, str]] = [
    ("lr", -1e-9, "lr=-1e-09 is out of range: must be >= 0"),
    ("lr", NAN, "lr=nan is not a finite number"),
    ("lr", "1e-3", "lr='1e-3' is not a finite number. Give it without quotes; YAML reads 1e-3 as text"),
    ("lr", "auto", "lr='auto' is not a finite number, and only the Trainer and Accelerate put one in"),
    ("momentum", -0.1, "momentum=-0.1 is out of range: must be in [0, 1)"),
    ("momentum", 1.0, "momentum=1.0 is out of range: must be in [0, 1)"),
    ("nesterov", 1, "nesterov=1 must be true or false"),
    ("betas", (1.0, 0.9), "betas[0]=1.0 is out of range: must be in [0, 1)"),
    ("betas", [0.9, -0.1], "betas[1]=-0.1 is out of range: must be in [0, 1)"),
    ("betas", 0.9, "betas=0.9 must be two numbers in [0, 1)"),
    ("betas", (0.9, 0.99, 0.999), "betas=(0.9, 0.99, 0.999) must be two numbers in [0, 1)"),
    ("beta3", 1.0, "beta3=1.0 is out of range: must be in [0, 1)"),
    ("beta3", -0.1, "beta3=-0.1 is out of range: must be in [0, 1)"),
    ("eps", -1e-8, "eps=-1e-08 is out of range: must be >= 0"),
    ("weight_decay", -0.01, "weight_decay=-0.01 is out of range: must be >= 0"),
    ("weight_decay", float("inf"), "weight_decay=inf is not a finite number"),
    ("gamma", 0.0, "gamma=0.0 is out of range: must be in (0, 1]"),
    ("gamma", 1.01, "gamma=1.01 is out of range: must be in (0, 1]"),
    ("gamma", True, "gamma=True is not a finite number"),
    ("gsnr_eps", 0.0, "gsnr_eps=0.0 is out of range: must be > 0"),
    ("trust_coefficient", 0.0, "trust_coefficient=0.0 is out of range: must be > 0"),
    ("trust_clip", 10.0, "trust_clip=10.0 must be None or a pair (lo, hi)"),
    ("trust_clip", (2.0, 1.0), "trust_clip=(2.0, 1.0) is out of range: must have 0 <= lo <= hi"),
    ("trust_clip", (-1.0, 1.0), "trust_clip=(-1.0, 1.0) is out of range: must have 0 <= lo <= hi"),
    ("trust_clip", (0.0, NAN), "trust_clip[1]=nan is not a finite number"),
    ("bias_correction", 0, "bias_correction=0 must be true or false"),
    ("adapt", "no", "adapt='no' must be true or false"),
    ("prenormalize", None, "prenormalize=None must be true or false"),
    ("gsnr_dtype", "float16", 'gsnr_dtype=\'float16\' must be "float32" or "bfloat16"'),
    ("reduction", "both", 'reduction=\'both\' must be "auto", "fused" or "observe"'),
    ("ranks_per_node", 0, "ranks_per_node=0 is out of range: must be None or an integer >= 1"),
    ("ranks_per_node", True, "ranks_per_node=True is out of range"),
    ("nonfinite", "ignore", 'nonfinite=\'ignore\' must be "skip" or "error"'),
    ("watch", "warn", 'watch=\'warn\' must be None, "log", "error" or callable'),
    ("watch", True, "watch=True must be None, "),
]
# The ends of the ranges that are inside them.
RIGHT: list[tuple[str, Any]] = [
    ("lr", 0.0),
    ("momentum", 0.0),
    ("betas", (0.0, 0.0)),
    ("betas", [0.9, 0.999]),  # what a JSON gives
    ("beta3", 0.0),
    ("eps", 0),
    ("weight_decay", 0),
    ("gamma", 1e-3),
    ("gamma", 1),
    ("trust_clip", None),
    ("trust_clip", [0.0, 0.0]),
    ("gsnr_dtype", torch.bfloat16),
    ("reduction", "fused"),
    ("ranks_per_node", 1),
    ("nonfinite", "error"),
    ("watch", None),
    ("watch", "error"),
    ("watch", print),
]


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def takes(cls: type[VROptimizer], name: str) -> bool:
    return cls.__name__ in OPTIONS[name].of


def words(text: str) -> str:
    return " ".join(text.split())


def test_every_argument_is_tried() -> None:
    assert {name for name, _, _ in WRONG} == set(OPTIONS)


# --- the table, the signatures, help() and the page


@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_signature_is_the_table(cls: type[VROptimizer]) -> None:
    params, *parameters = inspect.signature(cls).parameters.values()
    assert params.name == "params"
    assert {p.name: p.default for p in parameters} == {
        name: option.of[cls.__name__] for name, option in OPTIONS.items() if takes(cls, name)
    }
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["lr"]


@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_types_are_written_out(cls: type[VROptimizer]) -> None:
    hints = get_type_hints(cls.__init__)
    assert set(hints) == {"params", "return", *(name for name in OPTIONS if takes(cls, name))}
    for name, hint in hints.items():
        assert hint is not Any
        if name in ("gsnr_dtype", "reduction", "nonfinite"):
            quoted = re.findall(r'"(\w+)"', OPTIONS[name].range.text)
            assert [choice for choice in _flat(hint) if isinstance(choice, str)] == quoted


def _flat(hint: Any) -> list[Any]:
    return [inner for arg in get_args(hint) for inner in (_flat(arg) or [arg])]


@pytest.mark.slow
def test_a_type_checker_sees_a_typo(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    calls = {
        "VRLAMB(p, weigth_decay=0.1)": "call-arg",
        "LAMB(p, beta3=0.9)": "call-arg",
        "LAMB(p, beta=(0.9, 0.99))": "call-arg",
        'VRMomentum(p, reduction="fuse")': "arg-type",
        "LARS(p, lr=0.1, momentum=0.8)": "",
    }
    file = tmp_path / "program.py"
    lines = ["import ds_vrgd, torch", "p = [torch.nn.Parameter(torch.ones(2))]", *(f"ds_vrgd.{call}" for call in calls)]
    file.write_text("\n".join(lines), "utf-8")
    told, _, _ = api.run(["--config-file", str(PAGE.parents[1] / "pyproject.toml"), "--no-pretty", str(file)])
    for number, code in enumerate(calls.values(), start=3):
        assert (re.findall(rf"program.py:{number}: error: .*\[(.*)\]", told) or [""]) == [code], told


@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_help_has_the_line_of_every_argument_and_of_no_other(cls: type[VROptimizer]) -> None:
    shown = words(pydoc.plain(pydoc.render_doc(cls)).replace("|", " "))
    args = words(inspect.getdoc(cls) or "").split(" Args: ")[1].split(" Raises: ")[0]
    assert args in shown
    for name, option in OPTIONS.items():
        assert (f" {name}: {words(option.meaning)}" in args) == takes(cls, name)
        assert (f" {name}: " in args) == takes(cls, name)
    assert inspect.getdoc(cls).count("Args:") == 1  # type: ignore[union-attr]


def test_the_page_has_the_table() -> None:
    rows = {}
    for name, option in OPTIONS.items():
        defaults: dict[str, list[str]] = {}
        for optimizer, default in option.of.items():
            defaults.setdefault(f'"{default}"' if isinstance(default, str) else str(default), []).append(optimizer)
        usual = max(defaults, key=lambda default: len(defaults[default]))
        others = [f"{', '.join(of)}: {default}" for default, of in defaults.items() if default != usual]
        allowed = option.range.text.replace(">=", "≥").replace("<=", "≤")
        rows[name] = ["; ".join([usual, *others]), allowed, list(option.of)]
    found = {}
    for name, default, allowed, of in re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text("utf-8"), re.M
    ):
        reducing = [cls.__name__ for cls in OPTIMIZERS.values() if cls.reduces_variance]
        groups = {"all": list(OPTIMIZERS), "all VR": reducing}
        found[name] = [default, allowed, groups.get(of, of.split(", "))]
    assert found.keys() == rows.keys()
    for name, row in rows.items():
        assert found[name][:2] == row[:2]
        assert sorted(found[name][2]) == sorted(row[2])


# --- values


@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_every_argument_is_checked(cls: type[VROptimizer]) -> None:
    assert set(cls([weight()]).defaults) <= set(OPTIONS)


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_out_of_range(name: str, value: Any, message: str) -> None:
    takers = [cls for cls in OPTIMIZERS.values() if takes(cls, name)]
    assert takers
    for cls in takers:
        with pytest.raises(ValueError, match=re.escape(message)):
            cls([weight()], **{name: value})
        if name in WHOLE:
            continue
        with pytest.raises(ValueError, match=re.escape(message)):
            cls([{"params": [weight()]}, {"params": [weight()], name: value}])
        optimizer = cls([weight()])
        with pytest.raises(ValueError, match=re.escape(message)):
            optimizer.add_param_group({"params": [weight()], name: value})


@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_ends_of_the_range(name: str, value: Any) -> None:
    for cls in OPTIMIZERS.values():
        if takes(cls, name) and not (name == "momentum" and cls is VRMomentum):
            optimizer = cls([weight()], **{name: value})
            found = getattr(optimizer, name) if name in WHOLE else optimizer.param_groups[0][name]
            assert found == value


# --- names


@pytest.mark.parametrize("kind", [TypeError, ValueError])  # as in any call; as in any configuration
@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_an_unknown_argument_is_named_with_the_known_ones(cls: type[VROptimizer], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=rf"{cls.__name__} has no argument momentun=0\.8.*; it takes ") as raised:
        cls([weight()], momentun=0.8)  # type: ignore[call-arg]
    offered = str(raised.value).split("it takes ")[1].split(", ")
    assert offered == sorted(name for name in OPTIONS if takes(cls, name))


def test_a_misspelt_argument_is_named_with_what_was_meant() -> None:
    with pytest.raises(TypeError, match=r"VRLAMB has no argument weigth_decay=0\.5 \(did you mean 'weight_decay'\?\)"):
        VRLAMB([weight()], weigth_decay=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"LARS has no argument Eps=1 \(did you mean 'eps'\?\)"):
        LARS([weight()], Eps=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"VRSGD has no argument scale=2; it takes"):
        VRSGD([weight()], scale=2)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"VRSGD has no argument beta3=0\.9, which VRAdam, VRAdamW, VRLAMB have; it takes"
    ):
        VRSGD([weight()], beta3=0.9)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["fused", "foreach"])
def test_a_choice_of_torchs_implementation_is_to_be_left_out(name: str) -> None:
    with pytest.raises(TypeError, match=rf"VRAdam has no argument {name}=True: it chooses among .* Leave it out$"):
        VRAdam([weight()], **{name: True})


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("wd", "use weight_decay"),
        ("beta1", "betas=(beta1, beta2)"),
        ("amsgrad", "Leave it out"),
        ("dampening", "Leave it out"),
        ("torch_adam", "Leave it out"),
        ("max_coeff", "trust_clip=(lo, hi)"),
        ("max_grad_norm", "gradient_clipping in the DeepSpeed JSON"),
        ("adam_w_mode", "Use VRAdamW for true, VRAdam for false"),
    ],
)
def test_an_argument_of_another_optimizer_is_answered_with_the_way_out(name: str, way_out: str) -> None:
    with pytest.raises(TypeError, match=rf"VRLAMB has no argument {name}=True: .*{re.escape(way_out)}"):
        VRLAMB([weight()], **{name: True})


class Labelled(VRLAMB):
    """A user's, with an argument more."""

    def __init__(self, params: Any, label: str = "", **arguments: Any) -> None:
        super().__init__(params, **arguments)
        self.label = label


def test_a_subclass_may_have_arguments_of_its_own() -> None:
    assert Labelled([weight()], label="a", eps=1e-3).defaults["eps"] == 1e-3
    with pytest.raises(TypeError, match=r"Labelled has no argument lable='a' \(did you mean 'label'\?\)"):
        Labelled([weight()], lable="a")


#: Of DeepSpeed (MoE, Muon, FusedAdam), Megatron, torch's optimizers and schedulers, Transformers, timm and users.
KEYS_OF_OTHERS = (
    "name", "names", "param_names", "moe", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum",
    "wd_mult", "lr_mult", "pre_wd_mult", "start_wd", "end_wd", "use_muon", "is_expert_parallel", "is_decoupled_lr",
    "default_config", "lr_scale", "step", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
    "dampening", "decoupled_weight_decay", "initial_weight_decay", "base_weight_decay", "max_grad_norm", "max_coeff",
    "min_coeff", "rank", "scale", "update_proj_gap", "proj_type", "layer", "group_name", "weight_decay_mult", "alpha",
    "always_adapt", "adapt", "beta3", "momentum", "trust_clip",
)  # fmt: skip


def test_keys_of_a_group_that_are_no_argument_are_left_alone() -> None:
    for cls in OPTIMIZERS.values():
        others = {key: 0.0 for key in KEYS_OF_OTHERS if key not in cls([weight()]).defaults}
        group = cls([{"params": [weight()], **others}]).param_groups[0]
        assert all(group[key] == 0.0 for key in others)


TYPOS = {"gama": "gamma", "Gamma": "gamma", "weigth_decay": "weight_decay", "weightdecay": "weight_decay",
         "weight_decy": "weight_decay", "gsnr-eps": "gsnr_eps", "LR": "lr", "ada": None, "wd": None,
         "layer_id": None}  # fmt: skip


@pytest.mark.parametrize("typo", TYPOS)
@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_an_unknown_key_of_a_group_is_refused(cls: type[VROptimizer], typo: str) -> None:
    offered = ", ".join(sorted(name for name in OPTIONS if takes(cls, name) and name not in WHOLE))
    meant = TYPOS[typo]
    advice = f"did you mean '{meant}'\\?" if meant else f"it takes {offered}\\. Begin a key of your own with _"
    message = rf"{cls.__name__}: a param group has {typo}=0\.3, which is no argument; {advice}"
    with pytest.raises(ValueError, match=message):
        cls([{"params": [weight()]}, {"params": [weight()], typo: 0.3}])
    optimizer = cls([weight()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weight()], typo: 0.3})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_a_key_of_the_users_own_begins_with_an_underscore(cls: type[VROptimizer]) -> None:
    assert cls([{"params": [weight()], "_block": 3}]).param_groups[0]["_block"] == 3


class MyLAMB(LAMB):
    """A user's."""


REDUCING = [name for name, option in OPTIONS.items() if not {"LAMB", "LARS"} & set(option.of)]


@pytest.mark.parametrize(("cls", "twin"), [(LAMB, "VRLAMB"), (MyLAMB, "VRLAMB"), (LARS, "VRLARS")])
@pytest.mark.parametrize("name", REDUCING)
def test_optimizers_without_variance_reduction_refuse_its_arguments(
    cls: type[VROptimizer], twin: str, name: str
) -> None:
    others = ", ".join(OPTIONS[name].of)
    why = "observes no chunks" if name in WHOLE else "does no variance reduction"
    said = rf": it {why}\. Use {twin}$" if takes(OPTIMIZERS[twin], name) else f", which {others} have; it takes "
    with pytest.raises(TypeError, match=rf"{cls.__name__} has no argument {name}=0\.5{said}"):
        cls([weight()], **{name: 0.5})


@pytest.mark.parametrize("cls", [LAMB, LARS])
def test_optimizers_without_variance_reduction_refuse_gamma_in_a_group(cls: type[VROptimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{cls.__name__} has no argument gamma=0\.1"):
        cls([{"params": [weight()], "gamma": 0.1}])


def test_a_checkpoint_of_vrlamb_leaves_lamb_without_variance_reduction() -> None:
    lamb = LAMB([weight()])
    lamb.load_state_dict(VRLAMB([weight()], lr=0.5, gamma=0.1).state_dict())
    assert lamb.param_groups[0]["gamma"] == 1.0
    assert lamb.param_groups[0]["lr"] == 0.5


def test_nesterov_needs_momentum() -> None:
    for groups in ([weight()], [{"params": [weight()], "momentum": 0.0}]):
        with pytest.raises(ValueError, match="nesterov=True needs momentum > 0"):
            VRSGD(groups, nesterov=True)
    VRSGD([{"params": [weight()], "momentum": 0.9}], nesterov=True)


def test_defaults() -> None:
    # the README's and the paper's
    wanted = {"gamma": 0.1, "gsnr_eps": 1e-6, "betas": (0.9, 0.999), "beta3": 0.9, "weight_decay": 0.0}
    for name, cls in OPTIMIZERS.items():
        expected = dict(wanted)
        if not cls.reduces_variance:
            expected["gamma"] = 1.0
        if name == "VRAdamW":
            expected["weight_decay"] = 0.01  # torch.optim.AdamW's
        defaults = cls([weight()]).defaults
        for key in expected.keys() & defaults.keys():
            assert defaults[key] == expected[key], (name, key)
    assert VRMomentum([weight()]).defaults["momentum"] == 0.9
    assert VRSGD([weight()]).defaults["momentum"] == 0.0


@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_complex_weights_are_refused_by_what_has_no_rule_for_them(cls: type[VROptimizer]) -> None:
    number = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=rf"{cls.__name__}: 'w' is complex .*torch\.view_as_real"):
        cls([("w", number)])
    optimizer = cls([weight()])
    with pytest.raises(ValueError, match="'parameter 1' is complex"):
        optimizer.add_param_group({"params": [weight(), number]})
    assert len(optimizer.param_groups) == 1


def test_torchs_rule_for_complex_weights_is_kept_where_gamma_is_one() -> None:
    twins = [nn.Parameter(torch.tensor([1 + 2j, -3j])) for _ in range(2)]
    ours, theirs = VRAdam([twins[0]], lr=0.1, gamma=1.0), torch.optim.Adam([twins[1]], lr=0.1)
    for number, optimizer in zip(twins, (ours, theirs), strict=True):
        number.abs().square().sum().backward()
        optimizer.step()
    assert torch.equal(*twins)
