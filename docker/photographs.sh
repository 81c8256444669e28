#!/usr/bin/env bash
# Used inside the build: take the photographs of scikit-image and scikit-learn, with their licences, and leave
# the packages.
#
#   photographs.sh PACKAGES FOLDER       PACKAGES: where both are installed; FOLDER goes on Python's path
#
# The quick start finds the files beside the packages' __init__.py, which it does not run. Whoever imports the
# packages gets the error of a package that is not installed.
set -euo pipefail

packages=$1 folder=$2
take() { # take DISTRIBUTION MODULE FOLDER_OF_PICTURES
  local target=$folder/$2
  mkdir -p "$target/$3"
  find "$packages/$2/$3" -maxdepth 1 \( -name '*.png' -o -name '*.jpg' \) -exec cp -t "$target/$3" {} +
  find "$packages/$1"-*.dist-info -type f \( -iname 'LICENSE*' -o -iname 'COPYING*' \) -exec cp -t "$target" {} +
  if [ -z "$(find "$target/$3" -type f)" ] || [ -z "$(find "$target" -maxdepth 1 -type f)" ]; then
    echo "photographs.sh: $1 has no pictures in $3, or no licence" >&2
    exit 1
  fi
  echo "raise ModuleNotFoundError('only the photographs of $1 are installed', name='$2')" >"$target/__init__.py"
}
take scikit_image skimage data
take scikit_learn sklearn datasets/images
