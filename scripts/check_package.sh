#!/usr/bin/env bash
# Build sdists and wheels of ds_vrgd and ds_vrgd_recipes, install the wheels into a fresh environment, and run them far
# from the repository: with torch alone first, then with DeepSpeed, then with the recipes.
#
#   scripts/check_package.sh            borrows the dependencies of PYTHON's environment: seconds
#   scripts/check_package.sh --full     pip installs them, with the extras, as a user's pip would: minutes, gigabytes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD
python=${PYTHON:-$PWD/.venv/bin/python}
target=$repository/out/package
rm -rf "$target"
mkdir -p "$target/away"

# A wheel is built from its sdist, so a file that the sdist lacks is missing in both.
for project in . recipes; do
  "$python" -m build --outdir "$target/dist" "$project" > "$target/build.log" 2>&1 || { cat "$target/build.log" >&2; exit 1; }
done
wheel=$(echo "$target"/dist/ds_vrgd-*.whl)
recipes=$(echo "$target"/dist/ds_vrgd_recipes-*.whl)

# pip would count packages on PYTHONPATH as installed.
unset PYTHONPATH
"$python" -m venv "$target/venv"
new=$target/venv/bin
lent=$("$new/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth

# install WHEEL EXTRAS: with the dependencies of its extras. Borrowed ones are in a folder that a .pth file names. It is
# searched last, and its own .pth files (the editable installation of this repository) are not read.
install() {
  if [[ $full ]]; then
    DS_BUILD_OPS=0 "$new/pip" install --quiet --constraint "$repository/constraints/cpu.txt" "$1$2"
  else
    "$new/pip" install --quiet --no-deps "$1"
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$lent"
  fi
}
full=
if [[ ${1:-} == --full ]]; then full=1; fi

if [[ $full ]]; then
  install "$wheel" ''
else
  # torch and what it requires, and nothing else.
  "$python" - "$target/torch" <<'PROGRAM'
import pathlib, sys
from importlib import metadata
from packaging.requirements import Requirement
folder, todo, done = pathlib.Path(sys.argv[1]), ["torch"], set()
folder.mkdir()
while todo:
    name = todo.pop()
    done.add(name)
    found = metadata.distribution(name)
    needed = map(Requirement, found.requires or ())
    todo += {each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})} - done
    for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(found.locate_file(top))
PROGRAM
  "$new/pip" install --quiet --no-deps "$wheel"
  echo "$target/torch" > "$lent"
fi

cd "$target/away"
export PATH=$new:$PATH DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
python - "$target/venv" <<'PROGRAM'
import importlib.util, sys, pathlib, torch, ds_vrgd
place = pathlib.Path(ds_vrgd.__file__).resolve()
assert place.is_relative_to(pathlib.Path(sys.argv[1]).resolve()), f"{place} is not the installed wheel"
assert (place.parent / "py.typed").is_file(), "py.typed is missing: the wheel is not typed"
for other in ("deepspeed", "transformers", "packaging", "ds_vrgd_recipes"):
    assert importlib.util.find_spec(other) is None, f"{other} is installed: this is no environment with torch alone"
weight = torch.nn.Parameter(torch.ones(4))
optimizer = ds_vrgd.VRLAMB([weight], lr=0.1)
for factor in (1.0, 2.0):
    (weight * factor).sum().backward()
optimizer.step()
assert bool((weight < 1).all()), weight
print("package: a step of VRLAMB with torch alone, k =", ds_vrgd.gsnr_stats(optimizer).k)
PROGRAM
ds-vrgd --help > help.txt
status=0
ds-vrgd plan --run x --gpus 1 2> error.txt || status=$?
[[ $status == 2 ]] && grep -q 'pip install ds_vrgd_recipes' error.txt

install "$wheel" '[deepspeed,completion]'
cp "$repository/configs/ds_vrgd.json" .
ds-vrgd doctor --deepspeed_config ds_vrgd.json # its status is 0 if training is exact
# A program that does not import ds_vrgd, and one that is started through it.
cat > train.py <<'PROGRAM'
import deepspeed, sys, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled, which takes minutes
deepspeed.init_distributed("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1, auto_mpi_discovery=False)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "VRLAMB", "params": {"lr": 0.1}},
}
model = torch.nn.Linear(4, 2)
engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
assert type(engine.basic_optimizer).__module__ == "ds_vrgd.optim.lamb", engine.basic_optimizer
print("package: a JSON alone,", sys.argv[1], type(optimizer).__name__, type(engine.basic_optimizer).__name__)
PROGRAM
LOCAL_RANK=0 python train.py autoload "$PWD/store1"
LOCAL_RANK=0 DS_VRGD_AUTOLOAD=0 python -m ds_vrgd train.py module "$PWD/store2"

install "$recipes" '[bert,clicks,plot]'
python - "$repository/configs" <<'PROGRAM'
import filecmp, pathlib, sys, ds_vrgd_recipes
source = pathlib.Path(sys.argv[1])
installed = pathlib.Path(ds_vrgd_recipes.__file__).parent / "configs"
names = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
match, differ, gone = filecmp.cmpfiles(source, installed, names, shallow=False)
assert match == names, f"configs in the wheel: {differ} differ, {gone} are missing"
PROGRAM
ds-vrgd plan --run bert-large/64k-32k.yaml --gpus 64 --gpu-memory 80
ds-vrgd-recipes pretrain-bert --help > help.txt
echo "package: $(cd "$target/dist" && echo ds_vrgd*) built, installed and run in $target/venv"
