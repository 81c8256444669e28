#!/usr/bin/env bash
# Write docker/requirements-*.lock: every package of the image with its version and hashes, for Linux on
# x86_64 and on aarch64, and for each Python that a base image may bring.
#
#   docker/lock.sh [uv's options, e.g. --upgrade or --upgrade-package timm]
#
# Needs uv (pip install uv). Versions that are locked already stay, unless an option says otherwise.
# HIERA_LOCK_DIR is another folder of locks to work on, so that a test can compare.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$(realpath "${HIERA_LOCK_DIR:-$here}")
uv=${UV:-uv}
options=("$@")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# uv reads the machines to lock for from a project's file only. Wheels only: the build compiles nothing.
cat >"$work/pyproject.toml" <<'TOML'
[tool.uv]
environments = [
    "sys_platform == 'linux' and platform_machine == 'x86_64' and python_full_version < '3.15'",
    "sys_platform == 'linux' and platform_machine == 'aarch64' and python_full_version < '3.15'",
]
no-build = true
TOML
cd "$work"
# What all packages of the lock share need not be said at each of them.
both="\\(\\(platform_machine == 'aarch64' and sys_platform == 'linux'\\) or"
both="$both \\(platform_machine == 'x86_64' and sys_platform == 'linux'\\)\\)"

# lock NAME ARGUMENTS...: writes requirements-NAME.lock.
lock() {
  local file=$out/requirements-$1.lock
  shift
  "$uv" pip compile --quiet --no-header --generate-hashes --annotation-style line --universal \
    --python-version 3.11 --output-file "$file" "${options[@]}" "$@"
  # uv names the inputs by the paths of whoever ran it.
  sed -i -E -e "s|$here/||g" -e "s|$(dirname "$here")/||g" -e "s|$work/||g" \
    -e "s/python_full_version < '3.15' and //; s/ and python_full_version < '3.15'//; s/$both/sys_platform == 'linux'/" \
    "$file"
  sed -i '1i # Made by docker/lock.sh; do not edit.' "$file"
}

lock torch "$here/requirements-torch.in"
lock build "$here/requirements-build.in"
lock photographs --no-deps "$here/requirements-photographs.in"

# The application's part leaves out what torch's part installs, and agrees with it.
grep -E '^[A-Za-z0-9._-]+==' "$out/requirements-torch.lock" | sed -E 's/ *\\$//' >"$work/torch-pins.txt"
leave_out=()
while read -r name; do
  leave_out+=(--no-emit-package "$name")
done < <(sed -E 's/==.*//' "$work/torch-pins.txt" | sort -u)
lock app "${leave_out[@]}" --constraints "$work/torch-pins.txt" "$here/../pyproject.toml"
