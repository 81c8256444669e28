#!/usr/bin/env bash
# Make a Debian base image from Debian's packages alone, for machines that cannot or must not pull images.
#
#   docker/make-base.sh [TAG]          default: localhost/hiera-base:bookworm
#
# Needs root, debootstrap, podman and this machine's own package sources. The image holds no sources list, so
# that nothing of this machine stays in it; docker/build.sh lends the sources to the build.
# HIERA_ARCH=arm64 makes the base of another architecture (needs qemu-user-static).
set -euo pipefail

tag=${1:-localhost/hiera-base:bookworm}
suite=bookworm
arch=${HIERA_ARCH:-$(dpkg --print-architecture)}

find_mirror() {
  # shellcheck disable=SC2016 # apt's own placeholders
  apt-get indextargets --format '$(CODENAME) $(ORIGIN) $(SITE)' 'Created-By: Packages' |
    awk -v suite="$suite" '$1 == suite && $2 == "Debian" { print $3; exit }'
}
mirror=$(find_mirror)
if [ -z "$mirror" ]; then
  apt-get -qq update
  mirror=$(find_mirror)
fi
[ -n "$mirror" ] || { echo "make-base: apt on this machine has no sources of Debian $suite" >&2; exit 1; }

work=$(mktemp -d /var/tmp/hiera-base.XXXXXX)
clean() {
  # debootstrap mounts these, and leaves them when it is stopped.
  umount -q "$work/root/proc" "$work/root/sys" || true
  rm -rf --one-file-system "$work"
}
trap clean EXIT
if ! debootstrap --arch="$arch" --variant=minbase --include=ca-certificates,python3 \
  "$suite" "$work/root" "$mirror" >"$work/log" 2>&1; then
  cat "$work/log" "$work/root/debootstrap/debootstrap.log" >&2
  exit 1
fi

# What a container never reads, as Debian's own slim images leave it out too.
root=$work/root
cat >"$root/etc/dpkg/dpkg.cfg.d/slim" <<'SLIM'
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/lintian/*
SLIM
find "$root/usr/share/doc" -type f ! -name copyright -delete
find "$root/usr/share/doc" -type l -delete
find "$root/usr/share/doc" -type d -empty -delete
rm -rf "$root"/usr/share/{man,info,locale,lintian}/* "$root"/var/cache/apt/archives/*.deb \
  "$root"/var/cache/apt/*.bin "$root"/var/lib/apt/lists/* "$root"/var/cache/debconf/*-old "$root"/var/log/*
find "$root" -name __pycache__ -type d -prune -exec rm -rf {} +
: >"$root/etc/apt/sources.list"
: >"$root/etc/hostname"
: >"$root/etc/resolv.conf"

tar -C "$root" --numeric-owner -c . | podman import --arch "$arch" --change 'CMD ["bash"]' - "$tag"
