#!/usr/bin/env bash
# Can this machine build the image and run it under podman? If not, one line says what is missing: before a build
# of minutes, and without hanging. `make test-image` calls it first.
#
#   tests/image/preflight.sh
set -euo pipefail

refuse() {
  echo "preflight.sh: $1" >&2
  exit 1
}
GIB_TO_BUILD=${PREFLIGHT_GIB:-25} # the image twice, and twice more while its largest layer is written
GIB_TO_RUN=4

[ "$(id -u)" = 0 ] || refuse "the image's tests need root; call make with sudo"
for program in buildah podman runc conmon iptables; do
  command -v "$program" >/dev/null ||
    refuse "$program is missing; on Debian: apt-get install buildah podman runc conmon netavark iptables debootstrap catatonit"
done

# Without it podman takes itself for a user's, and leaves a process.
unshare --mount true 2>/dev/null || refuse "root may not make namespaces here: CAP_SYS_ADMIN is missing"

work=$(mktemp -d)
started=
clean() {
  [ -z "$started" ] || podman rm --force --ignore --time 0 "hiera-preflight-$$" >/dev/null 2>&1 || true
  rm -rf --one-file-system "$work"
}
trap clean EXIT
# From a folder that goes: conmon leaves a file `oom` in its working directory.
cd "$work"

# A container of one program, with all that the tests ask for: a network, a port, a memory limit.
mkdir root
mapfile -t libraries < <(ldd /bin/true | grep -o '/[^ ]*')
cp --parents --dereference /bin/true "${libraries[@]}" root/
processes=$(ulimit -Hu)
most=$(cat /proc/sys/kernel/pid_max)
if [ "$processes" = unlimited ] || [ "$processes" -gt "$most" ]; then
  processes=$most
fi
code=0
started=yes
timeout --kill-after=10 "${PREFLIGHT_SECONDS:-120}" podman --runtime runc --cgroup-manager cgroupfs run --rm \
  --name "hiera-preflight-$$" --ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" --ulimit "nproc=$processes:$processes" \
  --memory 64m --publish 127.0.0.1::9400 --read-only --cap-drop=all --security-opt no-new-privileges \
  --rootfs "$work/root" /bin/true >"$work/log" 2>&1 </dev/null || code=$?
if [ "$code" = 124 ] || [ "$code" = 137 ]; then
  refuse "podman starts no container here: no answer in ${PREFLIGHT_SECONDS:-120} s"
elif [ "$code" != 0 ]; then
  refuse "podman starts no container here (root needs CAP_NET_ADMIN and writable control groups): $(
    grep -v level=warning "$work/log" | tail -n 1
  )"
fi

storage=$(podman info --format '{{.Store.GraphRoot}}')
needed=$GIB_TO_BUILD
if podman image exists "${HIERA_IMAGE:-localhost/hiera-train:latest}"; then
  needed=$GIB_TO_RUN
fi
for place in "$storage" /var/tmp; do
  free=$(($(df --output=avail --block-size=1M "$place" | tail -n 1) / 1024))
  [ "$free" -ge "$needed" ] || refuse "$place has $free GiB free; building and running the image takes $needed GiB"
done
