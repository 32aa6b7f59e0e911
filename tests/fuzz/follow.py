"""One target under Atheris, which looks for inputs that reach new branches: ``run`` starts it."""

import logging
import os
import sys
import warnings

import atheris

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with atheris.instrument_imports(include=["vecroute"]):
    from tests.fuzz import targets

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    name = sys.argv.pop(1)
    targets.TARGETS[name].valid()  # one-time setup
    atheris.Setup(sys.argv, lambda data: targets.check(name, data))
    atheris.Fuzz()
