#!/usr/bin/env bash
# Build hiera-train's image with docker or buildah, whichever is here.
#
#   docker/build.sh [further options of the engine's build command]
#
# Environment, all optional:
#   IMAGE       name and tag                             hiera-train:latest
#   PLATFORM    linux/amd64, linux/arm64 or both with a comma between; default: this machine's
#   BASE_IMAGE  another base; `debootstrap`: one made from Debian's packages on this machine.
#               default: debian:bookworm-slim; with buildah, root and debootstrap: debootstrap
#   TORCH       `base` keeps the torch of the base image (NGC); default: `lock`
#   ENGINE      docker or buildah; default: docker when its engine answers, else buildah
#   WHEELS      a folder of wheels to use before the index, beside those that this machine's pip has on disk
#
# What this machine needs to reach its registries (pip.conf, apt's sources, certificates) is lent to the build as
# secrets and stays out of the image.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
image=${IMAGE:-hiera-train:latest}
platform=${PLATFORM:-}
base=${BASE_IMAGE:-}
torch=${TORCH:-lock}

if [ -n "${ENGINE:-}" ]; then
  engine=$ENGINE
elif command -v docker >/dev/null && docker info >/dev/null 2>&1; then
  engine=docker
elif command -v buildah >/dev/null; then
  engine=buildah
else
  echo "build.sh: neither docker (with its engine running) nor buildah is here" >&2
  exit 1
fi
if [ "$engine" = buildah ] && [ -z "$base" ] && [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null; then
  base=debootstrap
fi
pull=()
if [ "$base" = debootstrap ] && [[ $platform == *,* ]]; then
  # Each architecture has a base of its own; the images come together under one name.
  for one in ${platform//,/ }; do
    BASE_IMAGE=debootstrap PLATFORM=$one IMAGE=$image-${one##*/} ENGINE=$engine "$here/build.sh" "$@"
  done
  buildah manifest rm "$image" >/dev/null 2>&1 || true
  buildah manifest create "$image"
  for one in ${platform//,/ }; do
    buildah manifest add "$image" "$image-${one##*/}"
  done
  exit
fi
if [ "$base" = debootstrap ]; then
  if [ "$engine" != buildah ]; then
    echo "build.sh: BASE_IMAGE=debootstrap needs ENGINE=buildah" >&2
    exit 1
  fi
  arch=$(dpkg --print-architecture)
  if [ -n "$platform" ]; then
    arch=${platform#linux/}
  fi
  base=localhost/hiera-base:bookworm-$arch
  if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    HIERA_ARCH=$arch "$here/make-base.sh" "$base"
  fi
  pull=(--pull-never)
fi

lent=$(mktemp -d /var/tmp/hiera-build.XXXXXX)
trap 'rm -rf "$lent"' EXIT
mkdir "$lent/wheels"
secrets=()
lend() { # lend ID FILE
  if [ -s "$2" ]; then
    secrets+=(--secret "id=$1,src=$2")
  fi
}

# pip: index and options of this machine; wheels on its disk are hard-linked into a build context of their own.
# Debian's python3 may be without pip.
for python in python3 "$root/.venv/bin/python"; do
  if command -v "$python" >/dev/null && "$python" -m pip --version >/dev/null 2>&1; then
    "$python" "$here/local_wheels.py" --pip-conf >"$lent/pip.conf"
    lend pip-conf "$lent/pip.conf"
    PIP_FIND_LINKS="${WHEELS:-} ${PIP_FIND_LINKS:-}" \
      "$python" "$here/local_wheels.py" "$lent/wheels" "$here"/requirements-*.lock
    break
  fi
done
# apt: the sources, for the base image that was made here without any.
if [ ${#pull[@]} -gt 0 ]; then
  # shellcheck disable=SC2016 # apt's own placeholders
  apt-get indextargets --format 'deb $(SITE) $(RELEASE) $(COMPONENT) $(ORIGIN)' 'Created-By: Packages' |
    awk '$5 == "Debian" { $5 = ""; print }' | sort -u >"$lent/sources.list"
  lend apt-sources "$lent/sources.list"
  apt-config dump | grep -E '^Acquire::(http|https)::(Proxy|Verify)' >"$lent/apt.conf" || true
  echo 'Acquire::https::CaInfo "/run/secrets/ca";' >>"$lent/apt.conf"
  lend apt-conf "$lent/apt.conf"
fi
lend ca /etc/ssl/certs/ca-certificates.crt

version=$(sed -nE 's/^version = "(.*)"/\1/p' "$root/pyproject.toml")
revision=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
if [ -n "$(git -C "$root" status --porcelain 2>/dev/null)" ]; then
  revision=$revision-dirty
fi
arguments=(
  --file "$here/Dockerfile"
  --build-arg "TORCH=$torch" --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
  --build-context "wheels=$lent/wheels" "${secrets[@]}"
)
if [ -n "$base" ]; then
  arguments+=(--build-arg "BASE_IMAGE=$base")
fi
if [ -n "$platform" ]; then
  arguments+=(--platform "$platform")
fi

# With buildah several platforms make a manifest list of the name.
if [ "$engine" = buildah ] && [[ $platform == *,* ]]; then
  arguments+=(--manifest "$image")
else
  arguments+=(--tag "$image")
fi
if [ "$engine" = docker ]; then
  # An image of several platforms cannot be loaded into the engine: it goes to a registry (--push).
  docker buildx build "${arguments[@]}" "$@" "$root"
else
  # HEALTHCHECK exists in Docker's image format only. --force-rm: a build that fails leaves no container.
  buildah build --format docker --layers --force-rm --network host "${pull[@]}" "${arguments[@]}" "$@" "$root"
fi
