"""Importers of other programs' routing logs, one file a format."""
