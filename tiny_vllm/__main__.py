"""`python -m tiny_vllm` is the command `tiny-vllm`."""

import sys

from tiny_vllm.env import missing_package

try:
    from tiny_vllm.cli.main import main
except ModuleNotFoundError as error:
    if (error.name or "").startswith("tiny_vllm"):
        raise
    sys.exit(f"error: {missing_package(error)}")

if __name__ == "__main__":
    sys.exit(main())
