"""Starts the launcher with the fake worker: `python -m tests.launch.driver CONFIG [FLAGS]`, both JSON."""

from __future__ import annotations

import json
import sys

from service.config.schema import RunConfig
from service.errors import UserError
from service.launch.launcher import run


def main() -> int:
    """Exit code of the run, or of the user error."""
    config = RunConfig.model_validate(json.loads(sys.argv[1]))
    flags = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    try:
        return run(config, worker_module="tests.launch.fake_worker", **flags)
    except UserError as error:
        print(f"hiera-train: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
