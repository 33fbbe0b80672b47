"""One dense decoder driven by flags; a family file holds its config and weight names."""
