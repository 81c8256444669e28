#!/usr/bin/env bash
# Used inside the build: pip's install with what every call of it shares.
#
#   install-locked.sh PYTHON LOCK [pip's options]      PYTHON: interpreter of the environment to install into
#
# Wheels of the context `wheels` come as one more index, in /media/simple: among equal files pip takes those of
# the last index, where it would prefer a download to --find-links.
set -euo pipefail

python=$1 lock=$2
shift 2
# NGC's constraints are about its own packages.
unset PIP_CONSTRAINT
index=()
if [ -d /media/simple ]; then
  index=(--extra-index-url file:///media/simple)
fi
# The folder that this script lies in is the environment of the build tools, wherever it is mounted.
"$(dirname "${BASH_SOURCE[0]}")/bin/python" -m pip --python "$python" install --progress-bar off --no-cache-dir \
  --no-deps --no-compile --require-hashes --only-binary :all: "${index[@]}" -r "$lock" "$@"
