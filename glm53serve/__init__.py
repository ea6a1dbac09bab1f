"""glm53serve: serve GLM-5.3-Flash-architecture models over a line protocol."""

__version__ = "0.1.0"
