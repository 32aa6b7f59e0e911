"""A scikit-learn classifier on a frozen encoder: fitting, saving and loading, comparing heads."""

from vecroute.classifier.estimator import RoutingClassifier

__all__ = ["RoutingClassifier"]
