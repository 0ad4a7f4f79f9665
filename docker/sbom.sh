#!/bin/sh
# List the packages of this image's Python as a CycloneDX SBOM.
#
#   sbom.sh FILE.json
#
# The tool gets an environment of its own, which is removed again, so that it is not in the list.
set -eu

python -m venv --without-pip /tmp/sbom
python -m pip --python /tmp/sbom/bin/python install --quiet cyclonedx-bom==7.5.0
/tmp/sbom/bin/cyclonedx-py environment --output-reproducible --output-format JSON --output-file "$1" "$(command -v python)"
rm -r /tmp/sbom
