"""A web page and a JSON API for a fitted classifier: ``vecroute serve MODEL``."""

from vecroute.serve.app import Limits, create_app
from vecroute.serve.server import address, bind, hosts_for, run

__all__ = ["Limits", "address", "bind", "create_app", "hosts_for", "run"]
