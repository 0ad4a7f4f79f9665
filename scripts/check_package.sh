#!/usr/bin/env bash
# Build sdist and wheel, install the wheel into a fresh environment, and run it far from the repository.
#
#   scripts/check_package.sh            dependencies are lent by the environment of PYTHON: seconds
#   scripts/check_package.sh --full     pip installs them, with the extras, as a user's pip would: minutes, gigabytes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD
python=${PYTHON:-.venv/bin/python}
target=$repository/out/package
rm -rf "$target"
mkdir -p "$target/away"

# The wheel is built from the sdist, so what is missing there is missing in both.
"$python" -m build --outdir "$target/dist" . > "$target/build.log" 2>&1 || { cat "$target/build.log" >&2; exit 1; }
wheel=$(echo "$target"/dist/ds_vrgd-*.whl)

# What it names, pip would take for installed.
unset PYTHONPATH
"$python" -m venv "$target/venv"
new=$target/venv/bin
if [ "${1:-}" = --full ]; then
  DS_BUILD_OPS=0 "$new/pip" install --quiet --constraint constraints/cpu.txt "${wheel}[bert,clicks,hf,plot,completion]"
else
  # A folder that a .pth names is searched last, and its own .pth files (our editable installation) are not read.
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$new/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"
  "$new/pip" install --quiet --no-deps "$wheel"
fi

cp -R configs "$target/away"
cd "$target/away"
export PATH=$new:$PATH DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
python - "$target/venv" <<'PROGRAM'
import sys, pathlib, ds_vrgd
place = pathlib.Path(ds_vrgd.__file__).resolve()
assert place.is_relative_to(pathlib.Path(sys.argv[1]).resolve()), f"{place} is not the installed wheel"
assert (place.parent / "py.typed").is_file(), "py.typed is missing: the wheel is not typed"
PROGRAM
ds-vrgd --help
ds-vrgd plan --run configs/bert-large/64k-32k.yaml --gpus 64 --gpu-memory 80
ds-vrgd doctor --deepspeed_config configs/ds_vrgd.json
echo "package: $(cd "$target/dist" && echo ds_vrgd-*) built, installed and run in $target/venv"
