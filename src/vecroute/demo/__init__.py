"""The demos: film review sentences (``run``), and shapes drawn on photos (``vecroute.demo.shapes.run``)."""

from vecroute.demo.fitting import ROUTING, SEED, Samples, baselines, fitted, show_results
from vecroute.demo.sentences import TEST_FRACTION, report, run, sentence_polarity

__all__ = [
    "ROUTING",
    "SEED",
    "TEST_FRACTION",
    "Samples",
    "baselines",
    "fitted",
    "report",
    "run",
    "sentence_polarity",
    "show_results",
]
