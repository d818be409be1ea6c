"""Pages: a finished study, and how its workers move, as HTML that needs no network."""
