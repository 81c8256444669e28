"""Tests of the container image: its parts (any machine), and the image itself under podman (marker `system`)."""
