"""Logging for the package: library code never configures the root logger."""

import logging


def get_logger(name: str) -> logging.Logger:
    """Return the logger for a module; silent until the application configures logging."""
    logger = logging.getLogger(name)
    if name == "tiny_vllm" and not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger


get_logger("tiny_vllm")
